/* A decision through bmoe.h alone.
 *
 * Where `pip install` has put bmoe:
 *
 *   bmoe=$(python -c 'import os, bmoe_native._bmoe_cffi as m; print(os.path.dirname(m.__file__))')
 *   cc -std=c99 decide.c -o decide -I "$bmoe/include" -L "$bmoe" -Wl,-rpath,"$bmoe" -lbmoe -lm
 *
 * Where `cmake --install` has: -I PREFIX/include -L PREFIX/lib -Wl,-rpath,PREFIX/lib. Then:
 *
 *   ./decide model.gguf "Which is a fruit? A) apple B) table. Answer with the letter." A B
 *
 * Prints one line per choice: its log-probability over the whole vocabulary, and the choice.
 * Exit code: 0 decided, 1 engine failure, 2 wrong usage or a request that cannot be decided.
 */
#include <bmoe.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CHOICES 64

static int give_up(bmoe_engine *engine, const char *what) {
    fprintf(stderr, "decide: %s: %s\n", what, bmoe_last_error(engine));
    bmoe_close(engine);
    return 1;
}

/* The prompt as tokens: the question as one user message through the model's own template. *tokens is malloc'ed. */
static int32_t prompt_tokens(bmoe_engine *engine, const char *question, int32_t **tokens, size_t *n_tokens) {
    const bmoe_message message = {"user", question, strlen(question)};
    size_t n_bytes = 0, n_spans = 0;
    int32_t status = bmoe_render(engine, &message, 1, 0, 1, NULL, 0, &n_bytes, NULL, 0, &n_spans);
    if (status != BMOE_E_TOO_SMALL) return status; /* the first call only asks for the sizes */
    char *text = malloc(n_bytes);
    bmoe_span *spans = malloc(n_spans * sizeof *spans + 1);
    *tokens = malloc((n_bytes + 8) * sizeof **tokens);
    if (!text || !spans || !*tokens) {
        status = BMOE_E_MEMORY;
    } else {
        status = bmoe_render(engine, &message, 1, 0, 1, text, n_bytes, &n_bytes, spans, n_spans, &n_spans);
        if (status == BMOE_OK)
            status = bmoe_tokenize(engine, text, n_bytes, spans, n_spans, 1, *tokens, n_bytes + 8, n_tokens);
    }
    free(text);
    free(spans);
    return status;
}

/* The first token of a choice, which is what it is scored by; negative on an error. The whole choice is data. */
static int32_t first_token(bmoe_engine *engine, const char *choice) {
    int32_t tokens[1024];
    size_t n_tokens = 0;
    const bmoe_span all = {0, strlen(choice)};
    const int32_t status = bmoe_tokenize(engine, choice, all.end, &all, 1, 0, tokens, 1024, &n_tokens);
    if (status != BMOE_OK) return status;
    return n_tokens > 0 ? tokens[0] : BMOE_E_ARGUMENT;
}

/* log(sum(exp(logits))), in double and without overflow. */
static double log_sum_exp(const float *logits, size_t n) {
    double top = -HUGE_VAL, sum = 0.0;
    for (size_t i = 0; i < n; ++i) top = logits[i] > top ? logits[i] : top;
    for (size_t i = 0; i < n; ++i) sum += exp(logits[i] - top);
    return top + log(sum);
}

static int check_choices(bmoe_engine *engine, char **choices, int n_choices, int32_t *firsts) {
    for (int i = 0; i < n_choices; ++i) {
        firsts[i] = first_token(engine, choices[i]);
        if (firsts[i] < 0) {
            fprintf(stderr, "decide: the choice \"%s\" has no token to be scored by\n", choices[i]);
            return 2;
        }
        for (int j = 0; j < i; ++j) {
            if (firsts[i] == firsts[j]) {
                fprintf(stderr, "decide: \"%s\" and \"%s\" begin with the same token\n", choices[j], choices[i]);
                return 2;
            }
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 4 || argc - 3 > MAX_CHOICES) {
        fprintf(stderr, "usage: %s MODEL.gguf QUESTION CHOICE...   (1 to %d choices)\n", argv[0], MAX_CHOICES);
        return 2;
    }
    if (bmoe_abi_version() != BMOE_ABI_VERSION) {
        fprintf(stderr, "decide: libbmoe has ABI %d, this program needs %d\n", (int)bmoe_abi_version(),
                (int)BMOE_ABI_VERSION);
        return 1;
    }
    char error[512];
    bmoe_engine *engine = NULL;
    if (bmoe_open(&engine, argv[1], NULL, error, sizeof error) != BMOE_OK) {
        fprintf(stderr, "decide: %s\n", error);
        return 1;
    }
    char **choices = argv + 3;
    const int n_choices = argc - 3;
    int32_t firsts[MAX_CHOICES];
    const int refused = check_choices(engine, choices, n_choices, firsts);
    if (refused) {
        bmoe_close(engine);
        return refused;
    }
    int32_t *tokens = NULL;
    size_t n_tokens = 0, n_logits = 0;
    if (prompt_tokens(engine, argv[2], &tokens, &n_tokens) != BMOE_OK) {
        free(tokens);
        return give_up(engine, "the prompt");
    }
    const int32_t status = bmoe_prefill(engine, tokens, n_tokens, NULL);
    free(tokens);
    if (status != BMOE_OK) return give_up(engine, "the prefill");
    bmoe_logits(engine, NULL, 0, &n_logits);
    float *logits = malloc(n_logits * sizeof *logits);
    if (!logits || bmoe_logits(engine, logits, n_logits, &n_logits) != BMOE_OK) {
        free(logits);
        return give_up(engine, "the logits");
    }
    const double norm = log_sum_exp(logits, n_logits);
    for (int i = 0; i < n_choices; ++i) printf("%.17g %s\n", logits[firsts[i]] - norm, choices[i]);
    free(logits);
    bmoe_close(engine);
    return 0;
}
