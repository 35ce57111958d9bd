// Messages to a prompt through a chat template, and which bytes of the prompt are the caller's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bmoe.h"
#include "special_tokens.h"
#include "tokenize.h"

namespace bmoe {

struct Message {
    std::string role;
    std::string content;
};

struct Rendered {
    std::string text;
    Spans data;  // what came from the messages' content
};

class ChatTemplate {
  public:
    // Throws Error (BMOE_E_TEMPLATE) when the text is no template.
    ChatTemplate(const std::string &text, const std::string &bos, const std::string &eos);
    ~ChatTemplate();

    bmoe_think_ctl think_ctl() const { return think_ctl_; }
    // What a generated text has around its reasoning; empty where unknown.
    const std::string &reasoning_start() const { return reasoning_start_; }
    const std::string &reasoning_end() const { return reasoning_end_; }

    // Throws Error (BMOE_E_TEMPLATE) with the template's own words when it refuses the messages.
    //   specials  to find out whether the template could pass control text of a message off as its own
    Rendered render(const std::vector<Message> &messages, bool reasoning, bool generate,
                    const SpecialTokens &specials) const;

  private:
    struct Parsed;
    Rendered apply(const std::vector<Message> &messages, bool reasoning, bool generate) const;
    void read(const std::string &text, const std::string &bos, const std::string &eos);
    void learn_reasoning();
    std::string closing_of(const Rendered &rendered) const;
    std::vector<Message> fold_system(const std::vector<Message> &messages) const;
    void check_marks(const std::vector<Message> &messages, const Rendered &rendered, bool reasoning, bool generate,
                     const SpecialTokens &specials) const;

    std::vector<llama_token> own_control(const std::vector<Message> &messages, bool reasoning, bool generate,
                                         const SpecialTokens &specials) const;

    std::unique_ptr<Parsed> parsed_;
    bmoe_think_ctl think_ctl_ = BMOE_THINK_NONE;
    std::string think_start_;  // in a prompt
    std::string think_end_;
    std::string reasoning_start_;  // in what is generated
    std::string reasoning_end_;
};

}  // namespace bmoe
