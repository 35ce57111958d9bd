// Put in front of ggml's CPU sources by the compiler (-include), which are themselves not touched: where one of ggml's
// threads waits for the others by spinning, it calls ours instead of its own ggml_thread_cpu_relax().
#ifndef BMOE_LLAMA_RELAX_H
#define BMOE_LLAMA_RELAX_H

// One turn of a wait: csrc/os/relax.cpp.
void polite_relax(void);

// The definition, "ggml_thread_cpu_relax(void)", gets another name; a call, "ggml_thread_cpu_relax()", becomes ours.
#define POLITE_RELAX_void ggml_thread_cpu_relax_of_ggml(void)
#define POLITE_RELAX_ polite_relax()
#define ggml_thread_cpu_relax(...) POLITE_RELAX_##__VA_ARGS__

#endif
