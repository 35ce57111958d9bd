#include "render.h"

#include <algorithm>
#include <cctype>
#include <ctime>
#include <stdexcept>
#include <utility>

#include "chat.h"
#include "error.h"
#include "jinja/caps.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "log.h"
#include "os/heap_budget.h"
#include "os/stack.h"
#include "template_check.h"

namespace bmoe {

struct ChatTemplate::Parsed {
    common_chat_templates_ptr llama;  // llama.cpp's view of it: repairs of known templates, reasoning tags
    common_chat_template jinja;

    Parsed(common_chat_templates_ptr templates, const std::string &bos, const std::string &eos)
        : llama(std::move(templates)), jinja(common_chat_templates_source(llama.get()), bos, eos) {}
};

namespace {

// Tags of reasoning that are looked for where llama.cpp's analysis names none.
constexpr std::pair<const char *, const char *> USUAL_TAGS[] = {
    {"<think>", "</think>"},           {"<thinking>", "</thinking>"},
    {"[THINK]", "[/THINK]"},           {"<|START_THINKING|>", "<|END_THINKING|>"},
    {"<seed:think>", "</seed:think>"},
};

constexpr size_t MAX_TEMPLATE_BYTES = 1 << 20;
constexpr size_t PARSE_STACK = 64 << 20;

// llama.cpp's engine bounds neither loops nor recursion, and a template comes with a file from anywhere. These are far
// above what its own templates and long chats take: tests/csrc/test_render.cpp.
os::HeapBudget::Limits to_learn(size_t template_bytes) {
    return {size_t{2} << 30, 10'000'000, (1 << 20) + 128 * template_bytes, 1 << 20};
}

os::HeapBudget::Limits to_render(const std::vector<Message> &messages) {
    size_t content = 0;
    for (const Message &message : messages) content += message.content.size();
    const size_t n = messages.size();
    return {(256 << 20) + n * (8 << 20) + 256 * content, 2'000'000 + n * 50'000 + n * n * 500,
            (1 << 20) + n * 1024 + 16 * content, 1 << 20};
}

// What the engine threw, cut to the template's own words: the message after its last "Error: ", on one line.
std::string reason_of(const std::exception &error) {
    std::string text = error.what();
    for (const char *mark : {"Error: ", "Jinja Exception: "}) {
        const size_t at = text.rfind(mark);
        if (at != std::string::npos) text.erase(0, at + std::string(mark).size());
    }
    std::replace(text.begin(), text.end(), '\n', ' ');
    const size_t first = text.find_first_not_of(' ');
    const size_t last = text.find_last_not_of(' ');
    return first == std::string::npos ? "unknown error" : legible(text.substr(first, last - first + 1));
}

std::string trimmed(const std::string &text) {
    const size_t first = text.find_first_not_of(" \t\r\n");
    return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

jinja::value content_of(const std::string &content, const jinja::caps &caps) {
    auto text = jinja::mk_val<jinja::value_string>(content);
    text->mark_input();
    if (caps.supports_string_content || !caps.supports_typed_content) return text;
    auto part = jinja::mk_val<jinja::value_object>();
    part->insert("type", jinja::mk_val<jinja::value_string>(std::string("text")));
    part->insert("text", text);
    auto parts = jinja::mk_val<jinja::value_array>();
    parts->push_back(part);
    return parts;
}

jinja::value message_of(const std::string &role, const jinja::value &content) {
    auto object = jinja::mk_val<jinja::value_object>();
    // Roles are not marked: templates build control tokens from them ('<|' + role + '|>').
    object->insert("role", jinja::mk_val<jinja::value_string>(role));
    object->insert("content", content);
    return object;
}

std::string today(const char *format) {
    const std::time_t now = std::time(nullptr);
    std::tm local{};
    localtime_r(&now, &local);
    char text[64];
    std::strftime(text, sizeof text, format, &local);
    return text;
}

void set_variables(jinja::context &context, const jinja::value &messages, const std::string &bos,
                   const std::string &eos, bool reasoning, bool generate) {
    context.set_val("messages", messages);
    context.set_val("bos_token", jinja::mk_val<jinja::value_string>(bos));
    context.set_val("eos_token", jinja::mk_val<jinja::value_string>(eos));
    context.set_val("enable_thinking", jinja::mk_val<jinja::value_bool>(reasoning));
    context.set_val("datetime", jinja::mk_val<jinja::value_string>(today("%b %d %Y")));
    context.set_val("date_string", jinja::mk_val<jinja::value_string>(today("%d %b %Y")));
    if (generate) context.set_val("add_generation_prompt", jinja::mk_val<jinja::value_bool>(true));
}

// Run it once before llama.cpp does: its probing walks every value a template makes, without end for one that holds
// itself, while a plain run of the same meets the budget. That it refuses these messages says nothing.
void try_out(const jinja::lexer_result &words, const std::string &bos, const std::string &eos) {
    const jinja::program program = jinja::parse_from_tokens(words);
    auto messages = jinja::mk_val<jinja::value_array>();
    messages->push_back(message_of("user", jinja::mk_val<jinja::value_string>(std::string("question"))));
    jinja::context context(words.source);
    set_variables(context, messages, bos, eos, false, true);
    try {
        jinja::runtime::gather_string_parts(jinja::runtime(context).execute(program));
    } catch (const std::exception &) {
        return;
    }
}

// The text behind the last byte that came from a message: what opens the assistant's turn.
size_t tail_of(const Rendered &rendered) { return rendered.data.empty() ? 0 : rendered.data.back().end; }

// Whether reasoning begins in the text and does not end.
bool opens(const std::string &text, const std::string &opener, const std::string &closer) {
    const size_t at = text.rfind(opener);
    return at != std::string::npos && text.find(closer, at) == std::string::npos;
}

void append_part(Rendered &rendered, const jinja::string_part &part) {
    if (part.is_input && !part.val.empty())
        rendered.data.push_back({rendered.text.size(), rendered.text.size() + part.val.size()});
    rendered.text += part.val;
}

// Ids of the control tokens whose text stands outside the data, in order.
std::vector<llama_token> control_outside(const Rendered &rendered, const SpecialTokens &specials) {
    std::vector<llama_token> ids;
    for (const SpecialTokens::Match &match : specials.find_control(rendered.text, 0, rendered.text.size())) {
        if (!touches(rendered.data, match.begin, match.end)) ids.push_back(match.id);
    }
    return ids;
}

}  // namespace

ChatTemplate::ChatTemplate(const std::string &text, const std::string &bos, const std::string &eos) {
    LogSink *const log = current_log();
    os::run_with_stack(PARSE_STACK, [&] {
        const LogScope scope(log);
        try {
            const os::HeapBudget budget(to_learn(text.size()));
            read(text, bos, eos);
            learn_reasoning();
        } catch (const os::HeapBudget::Exceeded &exceeded) {
            fail(BMOE_E_TEMPLATE, "the chat template cannot be used: %s", exceeded.what);
        }
    });
}

void ChatTemplate::read(const std::string &text, const std::string &bos, const std::string &eos) {
    try {
        if (text.size() > MAX_TEMPLATE_BYTES)
            throw std::runtime_error("it has " + std::to_string(text.size()) + " bytes, allowed are " +
                                     std::to_string(MAX_TEMPLATE_BYTES));
        const jinja::lexer_result words = jinja::lexer().tokenize(text);
        check_template(words.tokens);
        try_out(words, bos, eos);
        common_chat_templates_ptr llama;
        try {
            llama = common_chat_templates_init(nullptr, text, bos, eos);
        } catch (const std::exception &) {
            // It throws a copy that has lost its words; parsing again says what is wrong.
            common_chat_template(text, bos, eos);
            throw;
        }
        parsed_ = std::make_unique<Parsed>(std::move(llama), bos, eos);
    } catch (const std::exception &error) {
        fail(BMOE_E_TEMPLATE, "the chat template cannot be parsed: %s", reason_of(error).c_str());
    }
}

ChatTemplate::~ChatTemplate() = default;

Rendered ChatTemplate::apply(const std::vector<Message> &messages, bool reasoning, bool generate) const {
    const common_chat_template &jinja = parsed_->jinja;
    auto list = jinja::mk_val<jinja::value_array>();
    for (const Message &message : messages)
        list->push_back(message_of(message.role, content_of(message.content, jinja.caps)));
    jinja::context context(jinja.source());
    set_variables(context, list, jinja.bos_token(), jinja.eos_token(), reasoning, generate);
    Rendered rendered;
    try {
        jinja::runtime runtime(context);
        const auto parts = jinja::runtime::gather_string_parts(runtime.execute(jinja.prog));
        for (const jinja::string_part &part : parts->val_str.parts) append_part(rendered, part);
    } catch (const std::exception &error) {
        fail(BMOE_E_TEMPLATE, "the chat template refused the messages: %s", reason_of(error).c_str());
    }
    return rendered;
}

// Which tags the model reasons between, from llama.cpp's analysis of the template, and what the switch does to the
// text that opens the assistant's turn. A template that cannot render a single user turn is left for render() to refuse.
void ChatTemplate::learn_reasoning() {
    bool known = false;
    try {
        common_chat_templates_inputs inputs;
        common_chat_msg question;
        question.role = "user";
        question.content = "question";
        inputs.messages = {question};
        inputs.enable_thinking = false;
        const common_chat_params params = common_chat_templates_apply(parsed_->llama.get(), inputs);
        known = params.supports_thinking;
        think_start_ = trimmed(params.thinking_start_tag);
        if (!params.thinking_end_tags.empty()) think_end_ = trimmed(params.thinking_end_tags.front());
    } catch (const std::exception &) {
        known = false;
    }
    reasoning_start_ = think_start_;
    reasoning_end_ = think_end_;
    const bool harmony = parsed_->jinja.source().find("<|channel|>") != std::string::npos &&
                         think_start_.find("<|channel|>") != std::string::npos;
    if (harmony) {
        // The turn opens without a channel; naming the final one leaves the reasoning channel out.
        // Source: the harmony response format of gpt-oss.
        think_start_ = "<|start|>assistant";
        think_end_ = "<|channel|>final<|message|>";
        reasoning_start_ = "<|channel|>analysis<|message|>";
        reasoning_end_ = "<|end|><|start|>assistant<|channel|>final<|message|>";
    }
    try {
        const std::vector<Message> question{{"user", "question"}};
        const Rendered off = apply(question, false, true);
        const Rendered on = apply(question, true, true);
        const std::string tail = off.text.substr(tail_of(off));
        const std::string on_tail = on.text.substr(tail_of(on));
        for (const auto &[opener, closer] : USUAL_TAGS) {
            if (think_start_.empty() && opens(tail, opener, closer)) think_start_ = opener;
            if (reasoning_end_.empty() && (opens(tail, opener, closer) || opens(on_tail, opener, closer))) {
                reasoning_start_ = opener;
                reasoning_end_ = closer;
            }
        }
        const size_t opened = think_start_.empty() ? std::string::npos : tail.rfind(think_start_);
        const bool open =
            opened != std::string::npos && (think_end_.empty() || tail.find(think_end_, opened) == std::string::npos);
        if (open)
            think_ctl_ = think_end_.empty() ? BMOE_THINK_FORCED : BMOE_THINK_CLOSED;
        else if (off.text != on.text)
            think_ctl_ = BMOE_THINK_SWITCH;
        else if (known)
            think_ctl_ = BMOE_THINK_FREE;
    } catch (const Error &) {
        think_ctl_ = BMOE_THINK_NONE;
    }
}

// What has to follow the opened turn so that the answer comes next; empty when reasoning is not open.
std::string ChatTemplate::closing_of(const Rendered &rendered) const {
    const std::string tail = rendered.text.substr(tail_of(rendered));
    const size_t opened = think_start_.empty() ? std::string::npos : tail.rfind(think_start_);
    if (opened == std::string::npos) return "";
    if (think_end_.empty()) {
        fail(BMOE_E_TEMPLATE,
             "the chat template opens reasoning (%s) and does not declare how it closes; give a template without it",
             legible(think_start_).c_str());
    }
    if (tail.find(think_end_, opened) != std::string::npos) return "";
    // A template that puts the opener on a line of its own writes an empty block as opener, empty line, closer.
    const bool own_line = tail.compare(opened + think_start_.size(), std::string::npos, "\n") == 0;
    return own_line ? "\n" + think_end_ + "\n\n" : think_end_;
}

// A template without a system role gets the system text in front of the first message, as llama.cpp does it.
std::vector<Message> ChatTemplate::fold_system(const std::vector<Message> &messages) const {
    if (parsed_->jinja.caps.supports_system_role || messages.empty() || messages.front().role != "system")
        return messages;
    if (messages.size() == 1)
        fail(BMOE_E_TEMPLATE,
             "this chat template has no system role, and there is no other message to put its text into");
    std::vector<Message> folded(messages.begin() + 1, messages.end());
    folded.front().content = messages.front().content + "\n" + folded.front().content;
    return folded;
}

// The control tokens that the template itself writes: those it writes around messages of nothing but x.
std::vector<llama_token> ChatTemplate::own_control(const std::vector<Message> &messages, bool reasoning, bool generate,
                                                   const SpecialTokens &specials) const {
    std::vector<Message> harmless = messages;
    for (Message &message : harmless) {
        for (char &byte : message.content)
            if (!isspace(static_cast<unsigned char>(byte))) byte = 'x';
    }
    return control_outside(apply(harmless, reasoning, generate), specials);
}

// A filter of the template may lose the mark on a message's text, and put control text together that was none. What
// then counts as the template's own is not what it writes around harmless messages: refuse it.
void ChatTemplate::check_marks(const std::vector<Message> &messages, const Rendered &rendered, bool reasoning,
                               bool generate, const SpecialTokens &specials) const {
    if (control_outside(rendered, specials) != own_control(messages, reasoning, generate, specials)) {
        fail(BMOE_E_TEMPLATE,
             "the chat template writes other control tokens for what these messages say than for plain words, so that "
             "nobody can tell which are its own; reword what in them looks like markup");
    }
}

Rendered ChatTemplate::render(const std::vector<Message> &messages, bool reasoning, bool generate,
                              const SpecialTokens &specials) const {
    const std::vector<Message> folded = fold_system(messages);
    try {
        const os::HeapBudget budget(to_render(folded));
        Rendered rendered = apply(folded, reasoning, generate);
        check_marks(folded, rendered, reasoning, generate, specials);
        if (!reasoning && generate) rendered.text += closing_of(rendered);
        return rendered;
    } catch (const os::HeapBudget::Exceeded &exceeded) {
        fail(BMOE_E_TEMPLATE, "the chat template cannot render these messages: %s", exceeded.what);
    }
}

}  // namespace bmoe
