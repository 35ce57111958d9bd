/* Decisions that continue one prefix, which is computed once: its state is kept, and loaded before each suffix.
 *
 *   ./kept model.gguf "Task: turn on Wi-Fi. History: ..." "Screen: ... A or B?" "Screen: ... A or B?" -- A B
 *
 * Compiled as decide.c is; prints a block of its lines for each suffix. To stderr goes how much was computed.
 */
#include "decision.h"

typedef struct Kept {
    int32_t *tokens; /* that the state has seen */
    size_t n_tokens;
    void *state;
    size_t n_bytes;
} Kept;

/* How many first tokens are the prefix's whatever follows: those that both have, but one. A merge across the join can make
 * the last one that looks shared another token in context. */
static size_t tokens_to_keep(const int32_t *prompt, size_t n_prompt, const int32_t *prefix, size_t n_prefix) {
    size_t common = 0;
    while (common < n_prompt && common < n_prefix && prompt[common] == prefix[common]) ++common;
    return common > 0 ? common - 1 : 0;
}

static int32_t keep(bmoe_engine *engine, Kept *kept, const int32_t *tokens, size_t n_tokens) {
    size_t n_bytes = 0;
    int32_t status = bmoe_state_size(engine, &n_bytes);
    if (status != BMOE_OK) return status;
    free(kept->tokens);
    free(kept->state);
    kept->tokens = malloc(n_tokens * sizeof *tokens + 1);
    kept->state = malloc(n_bytes + 1);
    kept->n_tokens = 0;
    if (!kept->tokens || !kept->state) return BMOE_E_MEMORY;
    status = bmoe_state_save(engine, kept->state, n_bytes, &kept->n_bytes);
    if (status != BMOE_OK) return status;
    memcpy(kept->tokens, tokens, n_tokens * sizeof *tokens);
    kept->n_tokens = n_tokens;
    return BMOE_OK;
}

/* Bring the engine to the end of the prompt, of which the first n_keep tokens are the prefix's. */
static int32_t compute(bmoe_engine *engine, Kept *kept, const int32_t *prompt, size_t n_prompt, size_t n_keep) {
    const int continues = kept->n_tokens > 0 && kept->n_tokens <= n_keep &&
                          memcmp(kept->tokens, prompt, kept->n_tokens * sizeof *prompt) == 0;
    const size_t done = continues ? kept->n_tokens : 0;
    int32_t status = continues ? bmoe_state_load(engine, kept->state, kept->n_bytes) : bmoe_state_drop(engine);
    if (status == BMOE_OK && n_keep > done) {
        status = bmoe_prefill(engine, prompt + done, n_keep - done, NULL);
        if (status == BMOE_OK) status = keep(engine, kept, prompt, n_keep);
    }
    if (status == BMOE_OK) status = bmoe_prefill(engine, prompt + n_keep, n_prompt - n_keep, NULL);
    fprintf(stderr, "%zu tokens, %zu of them from the kept state\n", n_prompt, done);
    return status;
}

static int32_t decide(bmoe_engine *engine, Kept *kept, const char *prefix, const char *suffix) {
    char *text = malloc(strlen(prefix) + strlen(suffix) + 1);
    int32_t *prompt = NULL, *alone = NULL;
    size_t n_prompt = 0, n_alone = 0;
    int32_t status = BMOE_E_MEMORY;
    if (text) {
        strcpy(text, prefix);
        strcat(text, suffix);
        status = prompt_tokens(engine, text, &prompt, &n_prompt);
    }
    if (status == BMOE_OK) status = prompt_tokens(engine, prefix, &alone, &n_alone);
    if (status == BMOE_OK)
        status = compute(engine, kept, prompt, n_prompt, tokens_to_keep(prompt, n_prompt, alone, n_alone));
    free(text);
    free(prompt);
    free(alone);
    return status;
}

int main(int argc, char **argv) {
    int dashes = 3;
    while (dashes < argc && strcmp(argv[dashes], "--") != 0) ++dashes;
    char **choices = argv + dashes + 1;
    const int n_choices = argc - dashes - 1;
    if (dashes < 4 || n_choices < 1 || n_choices > MAX_CHOICES) {
        fprintf(stderr, "usage: %s MODEL.gguf PREFIX SUFFIX... -- CHOICE...\n", argv[0]);
        return 2;
    }
    bmoe_engine *engine = open_model(argv[1], NULL);
    if (!engine) return 1;
    int32_t firsts[MAX_CHOICES];
    int code = first_tokens(engine, choices, n_choices, firsts);
    Kept kept = {NULL, 0, NULL, 0};
    for (int i = 3; i < dashes && code == 0; ++i) {
        if (decide(engine, &kept, argv[2], argv[i]) != BMOE_OK || print_choices(engine, choices, n_choices, firsts)) {
            fprintf(stderr, "decide: %s\n", bmoe_last_error(engine));
            code = 1;
        }
    }
    free(kept.tokens);
    free(kept.state);
    bmoe_close(engine);
    return code;
}
