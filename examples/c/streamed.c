/* A decision of a Mixture-of-Experts model whose experts stay in its file, and what its routers chose.
 *
 *   ./streamed model.gguf CACHE_MIB "Which is a fruit? A) apple B) table. Answer with the letter." A B
 *
 * Compiled as decide.c is, and prints what it prints: streaming changes no bit. To stderr goes what each layer asked for.
 */
#include <errno.h>

#include "decision.h"

#define MAX_LAYERS 512

typedef struct Asked {
    long n_uses; /* an expert computed for a token */
    long n_in_memory;
} Asked;

/* Runs inside bmoe_prefill(), on its thread; what routing points to is lent for the call. */
static void count(const bmoe_routing *routing, void *user) {
    Asked *asked = (Asked *)user + (routing->layer < MAX_LAYERS ? routing->layer : MAX_LAYERS - 1);
    for (int32_t i = 0; i < routing->n_tokens * routing->n_used; ++i) {
        asked->n_uses += 1;
        asked->n_in_memory += routing->residency != NULL && routing->residency[i] == BMOE_RESIDENT;
    }
}

static int decide(bmoe_engine *engine, const char *question, char **choices, int n_choices, bmoe_counters *spent) {
    int32_t firsts[MAX_CHOICES];
    const int refused = first_tokens(engine, choices, n_choices, firsts);
    if (refused) {
        bmoe_close(engine);
        return refused;
    }
    int32_t *tokens = NULL;
    size_t n_tokens = 0;
    int32_t status = prompt_tokens(engine, question, &tokens, &n_tokens);
    if (status == BMOE_OK) status = bmoe_prefill(engine, tokens, n_tokens, spent);
    free(tokens);
    if (status != BMOE_OK) return give_up(engine, "the prompt");
    if (print_choices(engine, choices, n_choices, firsts)) return give_up(engine, "the logits");
    bmoe_close(engine);
    return 0;
}

int main(int argc, char **argv) {
    char *end = NULL;
    errno = 0;
    const long cache_mib = argc > 2 ? strtol(argv[2], &end, 10) : -1;
    if (argc < 5 || argc - 4 > MAX_CHOICES || errno || *end != '\0' || cache_mib < 0 || cache_mib > 1 << 20) {
        fprintf(stderr, "usage: %s MODEL.gguf CACHE_MIB QUESTION CHOICE...\n", argv[0]);
        return 2;
    }
    static Asked asked[MAX_LAYERS];
    bmoe_open_params params;
    bmoe_open_params_init(&params);
    params.stream = 1;
    params.cache_bytes = (int64_t)cache_mib << 20;
    params.router = count;
    params.router_user = asked;
    bmoe_engine *engine = open_model(argv[1], &params);
    if (!engine) return 1;
    bmoe_counters spent = {.size_bytes = sizeof spent};
    const int code = decide(engine, argv[3], argv + 4, argc - 4, &spent);
    if (code) return code;
    for (int layer = 0; layer < MAX_LAYERS; ++layer) {
        if (asked[layer].n_uses > 0)
            fprintf(stderr, "layer %d: %ld expert uses, %ld in memory before\n", layer, asked[layer].n_uses,
                    asked[layer].n_in_memory);
    }
    fprintf(stderr, "read %.3f MiB, waited for it %.3f s\n", (double)spent.read_bytes / (1 << 20), spent.stall_s);
    return 0;
}
