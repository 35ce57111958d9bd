// ChatTemplate against llama.cpp's own rendering, over the templates that come with llama.cpp.
//   usage: test_render DIR_OF_TEMPLATES
// Prints a line per template; exits 1 when a text differs where it must not.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "chat.h"
#include "error.h"
#include "log.h"
#include "render.h"

namespace {

using bmoe::Message;

std::string read(const std::filesystem::path &path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// llama.cpp's prompt, or its refusal.
std::string reference(const std::string &source, const std::vector<Message> &messages, bool reasoning) {
    try {
        auto templates = common_chat_templates_init(nullptr, source, "<BOS>", "<EOS>");
        common_chat_templates_inputs inputs;
        for (const Message &message : messages) {
            common_chat_msg msg;
            msg.role = message.role;
            msg.content = message.content;
            inputs.messages.push_back(msg);
        }
        inputs.enable_thinking = reasoning;
        return common_chat_templates_apply(templates.get(), inputs).prompt;
    } catch (const std::exception &) {
        return "refused";
    }
}

std::string marked(const bmoe::Rendered &rendered) {
    std::string text;
    for (const bmoe_span &span : rendered.data) text += rendered.text.substr(span.begin, span.end - span.begin);
    return text;
}

// As long as a person or an agent will make it: no bound on a template's work may be in its way.
std::vector<Message> long_talk() {
    std::vector<Message> talk;
    for (int turn = 0; turn < 100; ++turn) {
        talk.push_back({"user", "question " + std::to_string(turn) + std::string(turn == 0 ? 4 << 20 : 300, 'q')});
        talk.push_back({"assistant", "answer " + std::to_string(turn)});
    }
    talk.push_back({"user", "the last"});
    return talk;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    bmoe::install_log_router();
    static const char *think[] = {"none", "switch", "closed", "free", "forced"};
    const std::vector<std::vector<Message>> talks = {
        {{"user", "  What is 2+2?\n\nA) 3\nB) 4 "}},
        {{"system", "Be brief."}, {"user", "Hello"}},
        {{"user", "Hello"}, {"assistant", "Hi."}, {"user", "And now?"}},
        long_talk(),
    };
    int wrong = 0, compared = 0;
    for (const auto &entry : std::filesystem::directory_iterator(argv[1])) {
        if (entry.path().extension() != ".jinja") continue;
        const std::string source = read(entry.path());
        const std::string name = entry.path().filename().string();
        try {
            const bmoe::ChatTemplate chat(source, "<BOS>", "<EOS>");
            printf("%-60s think=%s\n", name.c_str(), think[chat.think_ctl()]);
            for (const auto &talk : talks) {
                for (const bool reasoning : {false, true}) {
                    const std::string wanted = reference(source, talk, reasoning);
                    std::string got = "refused", data;
                    try {
                        const bmoe::Rendered rendered = chat.render(talk, reasoning, true, {});
                        got = rendered.text;
                        data = marked(rendered);
                    } catch (const bmoe::Error &error) {
                        printf("   refused: %s\n", error.what());
                    }
                    ++compared;
                    // A closed reasoning block is the one thing that may be added.
                    const bool closed = !reasoning && chat.think_ctl() == BMOE_THINK_CLOSED &&
                                        got.compare(0, wanted.size(), wanted) == 0;
                    // llama.cpp trims what it hands to this one; bmoe gives every template the text as it is.
                    if (name == "StepFun3.5-Flash.jinja" && talk[0].content[0] == ' ') continue;
                    if (got != wanted && !closed) {
                        ++wrong;
                        printf("   DIFFERS (reasoning %d):\n<<<%s>>>\n<<<%s>>>\n", reasoning, wanted.c_str(),
                               got.c_str());
                    } else if (closed)
                        printf("   closed: ...%s\n",
                               bmoe::legible(got.substr(std::max<size_t>(wanted.size(), 30) - 30)).c_str());
                    for (const Message &message : talk) {
                        if (got != "refused" && message.role == "user" &&
                            data.find(message.content.substr(message.content.find_first_not_of(' '), 5)) ==
                                std::string::npos) {
                            ++wrong;
                            printf("   NOT MARKED: %s in %s\n", message.content.c_str(), data.c_str());
                        }
                    }
                }
            }
        } catch (const bmoe::Error &error) {
            printf("%-60s %s\n", name.c_str(), error.what());
            ++wrong;
        }
    }
    printf("%d compared, %d wrong\n", compared, wrong);
    return wrong == 0 && compared > 0 ? 0 : 1;
}
