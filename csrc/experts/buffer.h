// A ggml buffer type for expert weights that reads nothing: it notes where a tensor lies and reserves addresses for it.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "experts/store.h"
#include "ggml-backend.h"
#include "model_file.h"

namespace bmoe {

class ExpertBufferType {
  public:
    // Both are kept by reference and outlive the model that is loaded into it.
    ExpertBufferType(ExpertStore &store, const std::map<std::string, TensorPlace> &places);
    ~ExpertBufferType();
    ExpertBufferType(const ExpertBufferType &) = delete;
    ExpertBufferType &operator=(const ExpertBufferType &) = delete;

    ggml_backend_buffer_type_t get() const;
    // Empty, or why a tensor could not be taken: llama.cpp keeps the text of an exception and loses its kind.
    const std::string &failure() const;

    struct Impl;

  private:
    std::unique_ptr<Impl> impl_;
};

}  // namespace bmoe
