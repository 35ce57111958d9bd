/* What the examples share: text to tokens, choices to tokens, logits to log-probabilities. A host takes it along. */
#ifndef DECISION_H
#define DECISION_H

#include <bmoe.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CHOICES 64

/* One user message through the model's own template, as tokens. *tokens is malloc'ed, also on an error. */
static inline int32_t prompt_tokens(bmoe_engine *engine, const char *question, int32_t **tokens, size_t *n_tokens) {
    const bmoe_message message = {"user", question, strlen(question)};
    size_t n_bytes = 0, n_spans = 0;
    *tokens = NULL;
    int32_t status = bmoe_render(engine, &message, 1, 0, 1, NULL, 0, &n_bytes, NULL, 0, &n_spans);
    if (status != BMOE_E_TOO_SMALL) return status; /* the first call only asks for the sizes */
    char *text = malloc(n_bytes + 1);
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
static inline int32_t first_token(bmoe_engine *engine, const char *choice) {
    int32_t tokens[1024];
    size_t n_tokens = 0;
    const bmoe_span all = {0, strlen(choice)};
    const int32_t status = bmoe_tokenize(engine, choice, all.end, &all, 1, 0, tokens, 1024, &n_tokens);
    if (status != BMOE_OK) return status;
    return n_tokens > 0 ? tokens[0] : BMOE_E_ARGUMENT;
}

/* The choices' first tokens. Returns 0, or 2 where two begin alike or one has none, and says so. */
static inline int first_tokens(bmoe_engine *engine, char **choices, int n_choices, int32_t *firsts) {
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

/* What turns logits less their maximum into log-probabilities over the whole vocabulary: log(sum(exp(l - top))).
 * On a grid of 2^-32: then every language's exp and order of summing come to the same double, and so to bmoe's own. */
static inline double log_total(const float *logits, size_t n, double top) {
    double sum = 0.0, lost = 0.0; /* Kahan's sum */
    for (size_t i = 0; i < n; ++i) {
        const double term = exp(logits[i] - top) - lost, next = sum + term;
        lost = (next - sum) - term;
        sum = next;
    }
    return rint(log(sum) * 4294967296.0) / 4294967296.0;
}

/* Print a line for each choice: its log-probability over the whole vocabulary, and the choice. 0, or 1 on an error. */
static inline int print_choices(bmoe_engine *engine, char **choices, int n_choices, const int32_t *firsts) {
    size_t n = 0;
    bmoe_logits(engine, NULL, 0, &n);
    float *logits = malloc(n * sizeof *logits + 1);
    const int failed = !logits || bmoe_logits(engine, logits, n, &n) != BMOE_OK;
    if (!failed) {
        double top = -HUGE_VAL;
        for (size_t i = 0; i < n; ++i) top = logits[i] > top ? logits[i] : top;
        const double norm = log_total(logits, n, top);
        for (int i = 0; i < n_choices; ++i) printf("%.17g %s\n", logits[firsts[i]] - top - norm, choices[i]);
    }
    free(logits);
    return failed;
}

/* Say why the last call failed, end the engine, and return the exit code for it. */
static inline int give_up(bmoe_engine *engine, const char *what) {
    fprintf(stderr, "decide: %s: %s\n", what, bmoe_last_error(engine));
    bmoe_close(engine);
    return 1;
}

/* Open a model; NULL, with the reason on stderr, where that fails. */
static inline bmoe_engine *open_model(const char *path, const bmoe_open_params *params) {
    if (bmoe_abi_version() != BMOE_ABI_VERSION) {
        fprintf(stderr, "decide: libbmoe has ABI %d, this program needs %d\n", (int)bmoe_abi_version(),
                (int)BMOE_ABI_VERSION);
        return NULL;
    }
    char error[512];
    bmoe_engine *engine = NULL;
    if (bmoe_open(&engine, path, params, error, sizeof error) != BMOE_OK) fprintf(stderr, "decide: %s\n", error);
    return engine;
}

#endif
