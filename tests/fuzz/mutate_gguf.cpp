// Half of the mutations of a model change one field of it, so that what comes out is a GGUF still.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

extern "C" size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

namespace {

struct Field {
    size_t at;
    size_t n_bytes;
};

constexpr uint32_t STRING = 8, ARRAY = 9;
// Of GGUF's types of values, by number; 0 for those without one size.
constexpr size_t SIZES[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
constexpr uint64_t NOTABLE[] = {0,          1,          2,      3,          7,          16,
                                0x7f,       0x80,       0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
                                1ull << 40, 1ull << 63, ~0ull,  0x3f800000, 0x7fc00000, 0x7f800000};

// The fields of a GGUF as far as it can be followed.
class Walk {
  public:
    Walk(const uint8_t *data, size_t size, size_t begin) : data_(data), size_(size), at_(begin) {
        skip(4);
        take(4);
        const uint64_t n_tensors = take(8), n_values = take(8);
        for (uint64_t i = 0; i < n_values && !over_; ++i) {
            text();
            value(static_cast<uint32_t>(take(4)));
        }
        for (uint64_t i = 0; i < n_tensors && !over_; ++i) {
            text();
            const uint64_t n_dims = take(4);
            for (uint64_t k = 0; k < n_dims && !over_; ++k) take(8);
            take(4);
            take(8);
        }
    }
    std::vector<Field> fields;

  private:
    void skip(uint64_t n) {
        over_ = over_ || n > size_ - at_;
        if (!over_) at_ += n;
    }
    uint64_t take(size_t n) {
        uint64_t number = 0;
        const size_t at = at_;
        skip(n);
        if (over_) return 0;
        memcpy(&number, data_ + at, n);
        fields.push_back({at, n});
        return number;
    }
    void text() { skip(take(8)); }
    void value(uint32_t type) {
        if (type == STRING) return text();
        if (type != ARRAY) {
            over_ = over_ || type >= sizeof SIZES / sizeof *SIZES;
            if (!over_) take(SIZES[type]);
            return;
        }
        const auto inner = static_cast<uint32_t>(take(4));
        const uint64_t n = take(8);
        // Of long lists the first few: they would be nearly all of the fields.
        for (uint64_t i = 0; i < n && !over_; ++i) {
            if (inner == STRING && i >= 4) {
                uint64_t length = 0;
                if (size_ - at_ >= 8) memcpy(&length, data_ + at_, 8);
                skip(8);
                skip(length);
            } else if (i >= 4 && inner < sizeof SIZES / sizeof *SIZES) {
                skip(SIZES[inner]);
            } else if (inner != ARRAY) {
                value(inner);
            } else {
                over_ = true;
            }
        }
    }
    const uint8_t *data_;
    size_t size_, at_;
    bool over_ = false;
};

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed) {
    std::minstd_rand random(seed);
    if (random() % 2 || size < 2) return LLVMFuzzerMutate(data, size, max_size);
    const std::vector<Field> fields = Walk(data, size, 1).fields;
    for (uint64_t n = 1 + random() % 3; n > 0 && !fields.empty(); --n) {
        const Field field = fields[random() % fields.size()];
        uint64_t number = 0;
        memcpy(&number, data + field.at, field.n_bytes);
        switch (random() % 4) {
            case 0:
                number = NOTABLE[random() % (sizeof NOTABLE / sizeof *NOTABLE)];
                break;
            case 1:
                number += random() % 9 - 4;
                break;
            case 2:
                number ^= 1ull << random() % (8 * field.n_bytes);
                break;
            default:
                number = random() % 2 ? number * 2 : number / 2;
        }
        memcpy(data + field.at, &number, field.n_bytes);
    }
    return size;
}
