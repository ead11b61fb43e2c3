// Vectorized Bernoulli sampling from the Mersenne Twister of PyTorch's CPU generator.
//
// MT19937 (Matsumoto and Nishimura, 1998, section 3.1): a block of 624 words is computed from the last
// one, of which 227 at a time are independent. ATen computes and tempers them one by one. A sample
// takes two words, as in ATen: 21 high bits from the first, and 32 low bits from the second.

#include <algorithm>
#include <cstdint>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // vectorizes
#if defined(__x86_64__)
#define COOP_VECTORS __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef COOP_VECTORS
#define COOP_VECTORS
#endif
#define COOP_INLINE static inline __attribute__((always_inline))

namespace {

constexpr int kWords = 624, kFar = 397;

COOP_INLINE uint32_t twisted(uint32_t word, uint32_t next, uint32_t far) {
  const uint32_t mixed = (word & 0x80000000u) | (next & 0x7fffffffu);
  return far ^ (mixed >> 1) ^ (-(next & 1u) & 0x9908b0dfu);
}

COOP_INLINE void twist(uint32_t* words) {
  for (int i = 0; i < kWords - kFar; ++i)
    words[i] = twisted(words[i], words[i + 1], words[i + kFar]);
#pragma GCC ivdep
  for (int i = kWords - kFar; i < kWords - 1; ++i)
    words[i] = twisted(words[i], words[i + 1], words[i + kFar - kWords]);
  words[kWords - 1] = twisted(words[kWords - 1], words[0], words[kFar - 1]);
}

COOP_INLINE uint32_t tempered(uint32_t word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

}  // namespace

// Sets each of `count` bytes at `mask` to 1 if a sample of 53 bits is below `limit`, else to 0. The
// generator's state: `block` has 624 words, one in each element, of which `left` - 1 are unused, from
// `next` on.
extern "C" COOP_VECTORS void coop_bernoulli(uint64_t* block, int32_t* left, uint64_t* next,
                                            int64_t count, uint64_t limit, uint8_t* mask) {
  uint32_t words[kWords], ready[kWords + 1];
  for (int i = 0; i < kWords; ++i) words[i] = static_cast<uint32_t>(block[i]);
  const auto high = static_cast<uint32_t>(limit >> 32), low = static_cast<uint32_t>(limit);
  int held = *left - 1, at = static_cast<int>(*next);
  int carried = 0;  // 1: the first word of a sample whose second is in the next block
  while (count > 0) {
    if (held == 0) {
      twist(words);
      held = kWords;
      at = 0;
    }
    for (int i = 0; i < held; ++i) ready[carried + i] = tempered(words[at + i]);
    const int64_t draws = std::min<int64_t>((carried + held) / 2, count);
    for (int64_t i = 0; i < draws; ++i) {
      const uint32_t first = ready[2 * i] & 0x1fffffu, second = ready[2 * i + 1];
      mask[i] = (first < high) | ((first == high) & (second < low));
    }
    mask += draws;
    count -= draws;
    const int taken = static_cast<int>(2 * draws) - carried;
    at += taken;
    held -= taken;
    carried = count > 0 && held == 1;
    if (carried) {
      ready[0] = ready[2 * draws];
      ++at;
      held = 0;
    }
  }
  for (int i = 0; i < kWords; ++i) block[i] = words[i];
  *left = held + 1;
  *next = static_cast<uint64_t>(at);
}
