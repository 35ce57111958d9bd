#include "experts/store.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "error.h"

namespace bmoe {

namespace {

constexpr uint32_t USE = 256;  // what a use adds to a score for each doubling of its tokens; a fifth is lost per graph
constexpr size_t ENOUGH_GUESSES = 24;
constexpr double LEAST_RIGHT = 0.8;
constexpr uint32_t LIKELY = 2 * USE;  // two tokens of one graph, or one of each of the last few

using Clock = std::chrono::steady_clock;

struct Stopwatch {
    double &total;
    Clock::time_point begin = Clock::now();
    explicit Stopwatch(double &seconds) : total(seconds) {}
    ~Stopwatch() { total += std::chrono::duration<double>(Clock::now() - begin).count(); }
};

// What the kernel gives and takes back; a block of a file is never larger.
const uintptr_t PAGE = std::max<uintptr_t>(Reader::BLOCK, static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)));

uintptr_t page_down(uintptr_t address) { return address / PAGE * PAGE; }
uintptr_t page_up(uintptr_t address) { return page_down(address + PAGE - 1); }

}  // namespace

ExpertStore::ExpertStore(const std::vector<std::string> &paths, const StoreOptions &options)
    : options_(options), reader_(paths, options.n_lanes, options.direct) {}

ExpertStore::~ExpertStore() {
    reader_.stop();
    for (Layer &layer : layers_)
        for (Tensor &tensor : layer.tensors) munmap(tensor.range, tensor.range_bytes);
}

void ExpertStore::add(ggml_tensor *tensor, int32_t layer_number, int32_t file, uint64_t offset) {
    const size_t lead = offset % PAGE;  // the address agrees with the offset within a page: direct reads land in place
    Tensor mine{tensor->name, file, offset, tensor->nb[2], nullptr, nullptr, 0};
    mine.range_bytes = page_up(lead + ggml_nbytes(tensor)) + PAGE;
    mine.range =
        mmap(nullptr, mine.range_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mine.range == MAP_FAILED) {
        fail(BMOE_E_MEMORY, "cannot reserve %zu MiB of address space for %s: %s", mine.range_bytes >> 20, tensor->name,
             strerror(errno));
    }
    madvise(mine.range, mine.range_bytes, MADV_NOHUGEPAGE);  // a huge page would hold slices that nobody asked for
    mine.base = static_cast<uint8_t *>(mine.range) + lead;
    tensor->data = mine.base;
    Layer *layer = layer_of(layer_number);
    if (!layer) {
        layers_.emplace_back();
        layer = &layers_.back();
        layer->number = layer_number;
        layer->experts.resize(static_cast<size_t>(tensor->ne[2]));
        index_of_.resize(std::max<size_t>(index_of_.size(), static_cast<size_t>(layer_number) + 1), -1);
        index_of_[static_cast<size_t>(layer_number)] = static_cast<int32_t>(layers_.size()) - 1;
    }
    if (layer->experts.size() != static_cast<size_t>(tensor->ne[2]))
        fail(BMOE_E_MODEL, "%s has %d experts, other tensors of its layer %zu", tensor->name,
             static_cast<int>(tensor->ne[2]), layer->experts.size());
    if (layer->tensors.size() == 32) fail(BMOE_E_MODEL, "layer %d has more than 32 tensors of experts", layer_number);
    layer->expert_bytes += static_cast<int64_t>(mine.slice_bytes);
    layer->tensors.push_back(std::move(mine));
}

void ExpertStore::finish() {
    std::sort(layers_.begin(), layers_.end(), [](const Layer &a, const Layer &b) { return a.number < b.number; });
    total_bytes_ = 0;
    for (size_t i = 0; i < layers_.size(); ++i) {
        index_of_[static_cast<size_t>(layers_[i].number)] = static_cast<int32_t>(i);
        total_bytes_ += layers_[i].expert_bytes * static_cast<int64_t>(layers_[i].experts.size());
    }
    share_budget();
}

const ExpertStore::Layer *ExpertStore::layer_of(int32_t number) const {
    if (number < 0 || static_cast<size_t>(number) >= index_of_.size()) return nullptr;
    const int32_t index = index_of_[static_cast<size_t>(number)];
    return index < 0 ? nullptr : &layers_[static_cast<size_t>(index)];
}

ExpertStore::Layer *ExpertStore::layer_of(int32_t number) {
    return const_cast<Layer *>(static_cast<const ExpertStore *>(this)->layer_of(number));
}

bool ExpertStore::is_readable(int32_t layer_number, const char *weights) const {
    if (current_ < 0 || layers_[static_cast<size_t>(current_)].number != layer_number) return false;
    const std::vector<Tensor> &tensors = layers_[static_cast<size_t>(current_)].tensors;
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const Tensor &t) { return t.name == weights && !t.released; });
}

void ExpertStore::use(const char *weights) {
    for (Tensor &tensor : layers_[static_cast<size_t>(current_)].tensors) tensor.used |= tensor.name == weights;
}

void ExpertStore::release_used() {
    if (current_ < 0) return;
    {
        const Stopwatch watch(counters_.mgmt_s);
        Layer &layer = layers_[static_cast<size_t>(current_)];
        const std::vector<int32_t> ids = superfluous(layer);
        for (size_t i = 0; i < layer.tensors.size(); ++i) {
            Tensor &tensor = layer.tensors[i];
            if (!tensor.used || tensor.released) continue;
            tensor.released = true;
            for (const int32_t id : ids) give_back(layer, i, static_cast<size_t>(id));
        }
    }
    use_room();
}

bmoe_residency ExpertStore::residency(int32_t layer_number, int32_t id) const {
    const Layer *layer = layer_of(layer_number);
    if (!layer || id < 0 || static_cast<size_t>(id) >= layer->experts.size()) return BMOE_ABSENT;
    const Expert &expert = layer->experts[static_cast<size_t>(id)];
    return expert.where == Where::absent ? BMOE_ABSENT : expert.ahead ? BMOE_AHEAD : BMOE_RESIDENT;
}

void ExpertStore::release_layer() {
    if (current_ < 0) return;
    {
        const Stopwatch watch(counters_.mgmt_s);
        trim(layers_[static_cast<size_t>(current_)]);
        current_ = -1;
    }
    use_room();
}

int64_t ExpertStore::layer_bytes() const {
    int64_t most = 0;
    for (const Layer &layer : layers_)
        most = std::max(most, layer.expert_bytes * static_cast<int64_t>(layer.experts.size()));
    return most;
}

// Each layer keeps the same share of its experts: a prompt walks the layers in a circle, and one list for all of them would
// give each expert up just before it is asked for again. What is left, less than an expert for each layer, goes to the first.
void ExpertStore::share_budget() {
    if (total_bytes_ == 0) return;
    const double share = static_cast<double>(options_.budget_bytes) / static_cast<double>(total_bytes_);
    int64_t left = options_.budget_bytes;
    for (Layer &layer : layers_) {
        layer.quota = static_cast<size_t>(std::min(share, 1.0) * static_cast<double>(layer.experts.size()));
        left -= layer.expert_bytes * static_cast<int64_t>(layer.quota);
    }
    for (Layer &layer : layers_) {
        if (layer.quota == layer.experts.size() || layer.expert_bytes > left) continue;
        ++layer.quota;
        left -= layer.expert_bytes;
    }
}

void ExpertStore::begin_graph() {
    const std::string changed = reader_.changed();
    if (!changed.empty()) fail(BMOE_E_READ, "the model file changed while it was open: %s", changed.c_str());
    ++graph_;
    current_ = -1;
    failure_.clear();
    n_guessed_ = n_right_ = 0;
    has_router_ = false;
    postponed_.clear();
    if (!layers_.empty() && options_.remember) ahead_of(0, layers_[0].likely);
}

// Read what is likely to be asked for, unless such guesses have been wrong in this one: then it is of another
// topic, and its first layers have shown it.
void ExpertStore::ahead_of(size_t index, const std::vector<int32_t> &guess) {
    if (!guesses_well() || index >= layers_.size()) return;
    Layer &layer = layers_[index];
    std::vector<int32_t> ids;
    for (const int32_t id : guess)
        if (static_cast<size_t>(id) < layer.experts.size() &&
            layer.experts[static_cast<size_t>(id)].where == Where::absent)
            ids.push_back(id);
    postponed_ = std::move(ids);
    ahead_index_ = index;
    read_postponed();
}

// As much as there is room for beside what stays and what is being computed with.
void ExpertStore::read_postponed() {
    if (postponed_.empty()) return;
    Layer &layer = layers_[ahead_index_];
    const int64_t room = options_.budget_bytes + options_.budget_bytes / 16 + layer_bytes() * 6 / 10;
    const int64_t n_fit = std::max<int64_t>(room - resident_bytes_ - reading_bytes_, 0) / layer.expert_bytes;
    const auto n_now = static_cast<std::ptrdiff_t>(std::min<size_t>(static_cast<size_t>(n_fit), postponed_.size()));
    std::vector<int32_t> ids(postponed_.begin(), postponed_.begin() + n_now);
    postponed_.erase(postponed_.begin(), postponed_.begin() + n_now);
    for (const int32_t id : ids) layer.experts[static_cast<size_t>(id)].ahead = true;
    counters_.bytes_ahead += layer.expert_bytes * n_now;
    read(layer, std::move(ids), false);
}

// What was given back has made room for guesses, and pages for them.
void ExpertStore::use_room() {
    take(reader_.collect(false));
    read_postponed();
    spares_.drop();
}

bool ExpertStore::guesses_well() const {
    return options_.look_ahead && (n_guessed_ < ENOUGH_GUESSES ||
                                   static_cast<double>(n_right_) >= LEAST_RIGHT * static_cast<double>(n_guessed_));
}

bool ExpertStore::may_look_ahead(int32_t layer_number) const {
    if (!options_.look_ahead || (has_router_ && !guesses_well()) || current_ < 0) return false;
    const auto next = static_cast<size_t>(current_) + 1;
    if (layers_[static_cast<size_t>(current_)].number != layer_number || next >= layers_.size()) return false;
    const std::vector<Expert> &experts = layers_[next].experts;
    return std::any_of(experts.begin(), experts.end(), [](const Expert &e) { return e.where == Where::absent; });
}

void ExpertStore::look_ahead(int32_t layer_number, const std::vector<int32_t> &guess) {
    const Layer *layer = layer_of(layer_number);
    if (!layer) return;
    if (!guess.empty() && !has_router_) {
        n_guessed_ = n_right_ = 0;  // what was remembered for the first layer says nothing of them
        has_router_ = true;
    }
    const auto next = static_cast<size_t>(layer - layers_.data()) + 1;
    if (next < layers_.size()) ahead_of(next, guess.empty() && options_.remember ? layers_[next].likely : guess);
}

void ExpertStore::ask(int32_t layer_number, const std::vector<int32_t> &given) {
    Layer *layer = layer_of(layer_number);
    if (!layer) return;
    std::vector<int32_t> ids = given, missing;
    {
        const Stopwatch watch(counters_.mgmt_s);
        std::sort(ids.begin(), ids.end());
        ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
        postponed_.clear();
        judge_guesses(*layer, ids);
        take(reader_.collect(false));
        // Asked for twice in one graph, what was released is read again.
        for (size_t id = 0; id < layer->experts.size(); ++id)
            if (layer->experts[id].released) give_back(*layer, static_cast<int32_t>(id));
        for (Tensor &tensor : layer->tensors) tensor.used = tensor.released = false;
        const auto index = static_cast<int32_t>(layer - layers_.data());
        for (const int32_t id : ids) {
            if (id < 0 || static_cast<size_t>(id) >= layer->experts.size())
                fail(BMOE_E_INTERNAL, "layer %d routes to expert %d of %zu", layer_number, id, layer->experts.size());
            Expert &expert = layer->experts[static_cast<size_t>(id)];
            counters_.bytes_routed += layer->expert_bytes;
            if (expert.where == Where::absent) {
                ++counters_.n_misses;
                missing.push_back(id);
            } else {
                expert.where == Where::resident && !expert.ahead ? ++counters_.n_hits : ++counters_.n_misses;
            }
            expert.ahead = false;
        }
        if (current_ >= 0 && current_ != index) trim(layers_[static_cast<size_t>(current_)]);
        current_ = index;
        count_uses(*layer, ids, given);
        read(*layer, missing, true);
    }
    asked_ = std::move(ids);
}

// An expert that several tokens of a prompt were routed to is likely to be asked for by the next; one that a single token
// was routed to, far less so.
void ExpertStore::count_uses(Layer &layer, const std::vector<int32_t> &ids, const std::vector<int32_t> &given) {
    std::vector<int32_t> n_tokens(layer.experts.size(), 0);
    for (const int32_t id : given) ++n_tokens[static_cast<size_t>(id)];
    for (Expert &expert : layer.experts) expert.score -= expert.score / 5;
    layer.likely.clear();
    for (const int32_t id : ids) {
        Expert &expert = layer.experts[static_cast<size_t>(id)];
        for (int32_t n = n_tokens[static_cast<size_t>(id)]; n > 0; n /= 2) expert.score += USE;
        expert.used_at = graph_;
        if (expert.score >= LIKELY || given.size() == ids.size()) layer.likely.push_back(id);
    }
}

// The router has run: what was guessed right is hurried, and what was guessed wrong and not read yet need not be.
void ExpertStore::judge_guesses(Layer &layer, const std::vector<int32_t> &ids) {
    drop(reader_.settle(&layer, ids));
    for (size_t id = 0; id < layer.experts.size(); ++id) {
        if (!layer.experts[id].ahead) continue;
        ++n_guessed_;
        n_right_ += std::binary_search(ids.begin(), ids.end(), static_cast<int32_t>(id));
    }
}

// Reads that will not be done; an expert that some of its reads are missing of is not there.
void ExpertStore::drop(const std::vector<ReadJob> &jobs) {
    std::vector<Reader::Done> gone;
    for (const ReadJob &job : jobs) {
        auto *layer = const_cast<Layer *>(static_cast<const Layer *>(job.owner));
        Expert &expert = layer->experts[static_cast<size_t>(job.tag)];
        expert.whole = false;
        gone.push_back({job.owner, job.tag, ""});
        if (!expert.ahead) continue;
        const auto unread = static_cast<int64_t>(job.n_bytes);
        counters_.bytes_ahead -= unread;
        counters_.bytes_wasted -= unread;  // giving the expert back counts all of it
    }
    take(gone);
}

// [first, last) of the whole pages within a slice; nothing lies in them but the slice.
std::pair<uintptr_t, uintptr_t> ExpertStore::own_pages(const Tensor &tensor, size_t index) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.base + index * tensor.slice_bytes);
    return {page_up(begin), page_down(begin + tensor.slice_bytes)};
}

// Jobs for experts that are absent, in the order of the file; long slices in several requests, which lanes share.
void ExpertStore::read(Layer &layer, std::vector<int32_t> ids, bool urgent) {
    std::sort(ids.begin(), ids.end());
    std::vector<ReadJob> jobs;
    for (const int32_t id : ids) {
        Expert &expert = layer.experts[static_cast<size_t>(id)];
        expert.where = Where::reading;
        expert.whole = true;
        reading_bytes_ += layer.expert_bytes;
        for (const Tensor &tensor : layer.tensors) {
            const auto [inner, inner_end] = own_pages(tensor, static_cast<size_t>(id));
            if (inner < inner_end) spares_.move_to(inner, inner_end - inner);
            for (size_t at = 0; at < tensor.slice_bytes; at += Reader::MAX_REQUEST) {
                const size_t begin = static_cast<size_t>(id) * tensor.slice_bytes + at;
                jobs.push_back({tensor.file, tensor.offset + begin, tensor.base + begin,
                                std::min(Reader::MAX_REQUEST, tensor.slice_bytes - at), &layer, id});
                ++expert.n_jobs;
                ++n_reading_;
            }
        }
    }
    if (!jobs.empty()) reader_.submit(jobs, urgent);
}

void ExpertStore::take(const std::vector<Reader::Done> &done) {
    for (const Reader::Done &job : done) {
        auto *layer = const_cast<Layer *>(static_cast<const Layer *>(job.owner));
        Expert &expert = layer->experts[static_cast<size_t>(job.tag)];
        --n_reading_;
        --expert.n_jobs;
        // A guess that cannot be read is read again if it is asked for.
        if (!job.error.empty() && failure_.empty() && !expert.ahead)
            failure_ =
                "expert " + std::to_string(job.tag) + " of layer " + std::to_string(layer->number) + ": " + job.error;
        if (!job.error.empty()) expert.whole = false;
        if (expert.n_jobs > 0) continue;
        expert.where = Where::resident;
        resident_bytes_ += layer->expert_bytes;
        reading_bytes_ -= layer->expert_bytes;
        if (!expert.whole) give_back(*layer, job.tag);
    }
}

bool ExpertStore::wait(const std::function<bool()> &is_unwanted) {
    spares_.drop();  // what was to be read has taken of them what it could
    if (current_ < 0) return true;
    Layer &layer = layers_[static_cast<size_t>(current_)];
    const auto is_there = [&](int32_t id) { return layer.experts[static_cast<size_t>(id)].where == Where::resident; };
    if (!std::all_of(asked_.begin(), asked_.end(), is_there)) {
        const Stopwatch watch(counters_.stall_s);
        while (failure_.empty() && !std::all_of(asked_.begin(), asked_.end(), is_there)) {
            if (is_unwanted()) return false;
            // A guess may have been dropped, or have failed, before it was asked for.
            std::vector<int32_t> again;
            for (const int32_t id : asked_)
                if (layer.experts[static_cast<size_t>(id)].where == Where::absent) again.push_back(id);
            read(layer, std::move(again), true);
            take(reader_.collect(true));
        }
    }
    if (!failure_.empty()) fail(BMOE_E_READ, "%s", failure_.c_str());
    return true;
}

// Those in memory that do not stay when their layer has been computed: the ones that prompts asked for least.
std::vector<int32_t> ExpertStore::superfluous(const Layer &layer) const {
    std::vector<int32_t> resident, partial;
    for (size_t id = 0; id < layer.experts.size(); ++id) {
        if (layer.experts[id].where != Where::resident) continue;
        (layer.experts[id].released ? partial : resident).push_back(static_cast<int32_t>(id));
    }
    if (resident.size() <= layer.quota) return partial;
    std::sort(resident.begin(), resident.end(), [&](int32_t a, int32_t b) {
        const Expert &x = layer.experts[static_cast<size_t>(a)], &y = layer.experts[static_cast<size_t>(b)];
        return x.score != y.score ? x.score > y.score : x.used_at != y.used_at ? x.used_at > y.used_at : a < b;
    });
    partial.insert(partial.end(), resident.begin() + static_cast<std::ptrdiff_t>(layer.quota), resident.end());
    return partial;
}

void ExpertStore::trim(Layer &layer) {
    for (const int32_t id : superfluous(layer)) give_back(layer, id);
    for (Tensor &tensor : layer.tensors) tensor.used = tensor.released = false;
}

// Whole pages of the slice, and those at its ends that hold nothing of an expert that stays: slices may be far smaller
// than a page.
void ExpertStore::give_back(Layer &layer, size_t tensor_index, size_t index) {
    const uint32_t bit = uint32_t{1} << tensor_index;
    if (layer.experts[index].released & bit) return;
    const auto stays = [&](size_t other) {
        return layer.experts[other].where != Where::absent && !(layer.experts[other].released & bit);
    };
    const Tensor &tensor = layer.tensors[tensor_index];
    const auto begin = reinterpret_cast<uintptr_t>(tensor.base + index * tensor.slice_bytes);
    const uintptr_t end = begin + tensor.slice_bytes;
    uintptr_t first = page_down(begin), last = page_up(end);
    for (size_t i = index; i > 0 && begin - (index - i) * tensor.slice_bytes > page_down(begin); --i)
        if (stays(i - 1)) first = page_up(begin);
    for (size_t i = index + 1; i < layer.experts.size() && end + (i - index - 1) * tensor.slice_bytes < page_up(end);
         ++i)
        if (stays(i)) last = page_down(end);
    const auto [inner, inner_end] = own_pages(tensor, index);
    if (inner < inner_end) {
        spares_.put(inner, inner_end - inner);
        if (first < inner) madvise(reinterpret_cast<void *>(first), inner - first, MADV_DONTNEED);
        first = inner_end;
    }
    if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED);
    layer.experts[index].released |= bit;
    resident_bytes_ -= static_cast<int64_t>(tensor.slice_bytes);
}

void ExpertStore::give_back(Layer &layer, int32_t id) {
    Expert &expert = layer.experts[static_cast<size_t>(id)];
    for (size_t i = 0; i < layer.tensors.size(); ++i) give_back(layer, i, static_cast<size_t>(id));
    if (expert.ahead) counters_.bytes_wasted += layer.expert_bytes;
    expert.ahead = false;
    expert.released = 0;
    expert.where = Where::absent;
}

void ExpertStore::end_graph() {
    const Stopwatch watch(counters_.mgmt_s);
    // A guess that did not come to be read is no longer wanted, and one that is being read must land first.
    drop(reader_.drop_waiting());
    while (n_reading_ > 0) {
        // Jobs that were counted and then could not be handed over.
        if (reader_.is_idle()) fail(BMOE_E_INTERNAL, "reads of experts were lost for want of memory");
        take(reader_.collect(true));
    }
    for (Layer &layer : layers_) {
        for (Expert &expert : layer.experts) {
            // It stays, perhaps, but as a guess it was wrong: the next graph does not judge it again.
            if (expert.ahead) counters_.bytes_wasted += layer.expert_bytes;
            expert.ahead = false;
        }
        trim(layer);
    }
    spares_.drop();
    current_ = -1;
}

void ExpertStore::set_budget(int64_t bytes) {
    options_.budget_bytes = bytes;
    share_budget();
    for (Layer &layer : layers_) trim(layer);
    spares_.drop();
}

StoreCounters ExpertStore::counters() {
    StoreCounters now = counters_;
    now.bytes_read = static_cast<int64_t>(reader_.bytes_read());
    now.io_s = reader_.busy_s();
    return now;
}

}  // namespace bmoe
