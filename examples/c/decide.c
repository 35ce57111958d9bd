/* A decision through bmoe.h alone.
 *
 * Where `pip install` has put bmoe:
 *
 *   bmoe=$(python -c 'import os, bmoe_native._bmoe_cffi as m; print(os.path.dirname(m.__file__))')
 *   cc -std=c99 decide.c -o decide -I "$bmoe/include" -L "$bmoe" -Wl,-rpath,"$bmoe" -lbmoe -lm
 *
 * Where `make install` has: -I PREFIX/include -L PREFIX/lib -Wl,-rpath,PREFIX/lib, or what pkg-config says. Then:
 *
 *   ./decide model.gguf "Which is a fruit? A) apple B) table. Answer with the letter." A B
 *
 * Prints one line per choice: its log-probability over the whole vocabulary, and the choice.
 * Exit code: 0 decided, 1 engine failure, 2 wrong usage or a request that cannot be decided.
 */
#include "decision.h"

int main(int argc, char **argv) {
    if (argc < 4 || argc - 3 > MAX_CHOICES) {
        fprintf(stderr, "usage: %s MODEL.gguf QUESTION CHOICE...   (1 to %d choices)\n", argv[0], MAX_CHOICES);
        return 2;
    }
    bmoe_engine *engine = open_model(argv[1], NULL);
    if (!engine) return 1;
    char **choices = argv + 3;
    const int n_choices = argc - 3;
    int32_t firsts[MAX_CHOICES];
    const int refused = first_tokens(engine, choices, n_choices, firsts);
    if (refused) {
        bmoe_close(engine);
        return refused;
    }
    int32_t *tokens = NULL;
    size_t n_tokens = 0;
    int32_t status = prompt_tokens(engine, argv[2], &tokens, &n_tokens);
    if (status == BMOE_OK) status = bmoe_prefill(engine, tokens, n_tokens, NULL);
    free(tokens);
    if (status != BMOE_OK) return give_up(engine, "the prompt");
    if (print_choices(engine, choices, n_choices, firsts)) return give_up(engine, "the logits");
    bmoe_close(engine);
    return 0;
}
