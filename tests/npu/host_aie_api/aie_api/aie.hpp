// A stand-in for AMD's aie_api on the host: as much of it as npu/kernels/attention.cc uses, written from its user guide
// (AMD UG1529, "AI Engine API User Guide") in plain loops. What it shows is that the kernel's own logic, layouts and
// masks are right by that guide. It does not show that the real aie_api compiles the kernel, or that AIE2 computes so.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

using int16 = int16_t;
using uint16 = uint16_t;
using int32 = int32_t;

struct accfloat {};
struct accauto {};

namespace aie {

enum class rounding_mode { floor, conv_even };
enum class lut_oor_policy { saturate, truncate };
constexpr unsigned vector_decl_align = 32;

// The core's own default is to round down.
inline rounding_mode current_rounding = rounding_mode::floor;
inline void set_rounding(rounding_mode mode) { current_rounding = mode; }

template <typename To, typename From>
To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace aie

struct bfloat16 {
  uint16_t bits;

  bfloat16() = default;
  explicit constexpr bfloat16(float x) : bits(rounded(x, aie::rounding_mode::conv_even)) {}
  operator float() const { return aie::bits_of<float>(uint32_t(bits) << 16); }

  static bfloat16 with(float x, aie::rounding_mode mode) {
    bfloat16 result;
    result.bits = rounded(x, mode);
    return result;
  }

 private:
  static constexpr uint16_t rounded(float x, aie::rounding_mode mode) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    // Down, towards minus infinity, is up in magnitude for negative numbers.
    const uint32_t add = mode == aie::rounding_mode::conv_even ? 0x7fff + (bits >> 16 & 1) : bits >> 31 ? 0xffff : 0;
    return uint16_t((bits + add) >> 16);
  }
};

namespace aie {

template <typename T, unsigned N>
struct vector {
  std::array<T, N> lanes;

  template <typename To>
  vector<To, N * sizeof(T) / sizeof(To)> cast_to() const {
    return bits_of<vector<To, N * sizeof(T) / sizeof(To)>>(*this);
  }
};

template <unsigned N>
struct mask {
  std::array<bool, N> lanes;

  bool empty() const {
    for (bool lane : lanes)
      if (lane)
        return false;
    return true;
  }

  mask operator&(const mask &other) const {
    mask both;
    for (unsigned i = 0; i < N; i++)
      both.lanes[i] = lanes[i] && other.lanes[i];
    return both;
  }
};

template <typename T, unsigned N, typename F>
vector<T, N> each(F f) {
  vector<T, N> result;
  for (unsigned i = 0; i < N; i++)
    result.lanes[i] = f(i);
  return result;
}

template <typename Tag, unsigned N>
struct accum {
  vector<float, N> sums;

  void from_vector(const vector<float, N> &from) { sums = from; }

  template <typename T>
  vector<T, N> to_vector() const {
    if constexpr (std::is_same_v<T, float>)
      return sums;
    else
      return each<T, N>([&](unsigned i) { return bfloat16::with(sums.lanes[i], current_rounding); });
  }
};

template <unsigned N, typename T>
vector<T, N> load_v(const T *from) {
  // A load of a whole register is aligned to it.
  if (reinterpret_cast<uintptr_t>(from) % std::min<size_t>(sizeof(T) * N, 32) != 0)
    std::abort();
  return each<T, N>([&](unsigned i) { return from[i]; });
}

template <typename T, unsigned N>
void store_v(T *to, const vector<T, N> &v) {
  if (reinterpret_cast<uintptr_t>(to) % std::min<size_t>(sizeof(T) * N, 32) != 0)
    std::abort();
  for (unsigned i = 0; i < N; i++)
    to[i] = v.lanes[i];
}

template <typename T, unsigned N>
vector<T, N> broadcast(T x) {
  return each<T, N>([&](unsigned) { return x; });
}

template <typename T, unsigned N>
vector<T, N> zeros() {
  return broadcast<T, N>(T(0));
}

// Both operands of `add`, `max` and their like may be vectors, or the second a scalar of their type.
template <typename T, unsigned N>
T lane(const vector<T, N> &v, unsigned i) {
  return v.lanes[i];
}
template <typename T>
T lane(const T &x, unsigned) {
  return x;
}

// Integers wrap around, as the core's do.
template <typename T>
using Wrapping = std::conditional_t<std::is_same_v<T, int32>, uint32_t, T>;

template <typename T, unsigned N, typename Other>
vector<T, N> add(const vector<T, N> &a, const Other &b) {
  return each<T, N>([&](unsigned i) { return T(Wrapping<T>(a.lanes[i]) + Wrapping<T>(lane(b, i))); });
}

template <typename T, unsigned N, typename Other>
vector<T, N> sub(const vector<T, N> &a, const Other &b) {
  return each<T, N>([&](unsigned i) { return T(Wrapping<T>(a.lanes[i]) - Wrapping<T>(lane(b, i))); });
}

template <typename T, unsigned N, typename Other>
vector<T, N> max(const vector<T, N> &a, const Other &b) {
  return each<T, N>([&](unsigned i) { return a.lanes[i] < lane(b, i) ? lane(b, i) : a.lanes[i]; });
}

template <typename T, unsigned N, typename Other>
vector<T, N> min(const vector<T, N> &a, const Other &b) {
  return each<T, N>([&](unsigned i) { return lane(b, i) < a.lanes[i] ? lane(b, i) : a.lanes[i]; });
}

template <typename T, unsigned N, typename Other>
accum<accfloat, N> mul(const vector<T, N> &a, const Other &b) {
  return {each<float, N>([&](unsigned i) { return float(a.lanes[i]) * float(lane(b, i)); })};
}

template <typename T, unsigned N>
vector<T, N> bit_and(T a, const vector<T, N> &b) {
  return each<T, N>([&](unsigned i) { return T(a & b.lanes[i]); });
}

template <unsigned N>
vector<int32, N> upshift(const vector<int32, N> &a, unsigned by) {
  return each<int32, N>([&](unsigned i) { return int32(uint32_t(a.lanes[i]) << by); });
}

template <typename T, unsigned N, typename Other, typename F>
mask<N> compare(const vector<T, N> &a, const Other &b, F f) {
  mask<N> result;
  for (unsigned i = 0; i < N; i++)
    result.lanes[i] = f(a.lanes[i], lane(b, i));
  return result;
}

template <typename T, unsigned N, typename Other>
mask<N> gt(const vector<T, N> &a, const Other &b) {
  return compare(a, b, [](T x, T y) { return x > y; });
}

template <typename T, unsigned N, typename Other>
mask<N> lt(const vector<T, N> &a, const Other &b) {
  return compare(a, b, [](T x, T y) { return x < y; });
}

template <typename T, unsigned N, typename Other>
mask<N> le(const vector<T, N> &a, const Other &b) {
  return compare(a, b, [](T x, T y) { return x <= y; });
}

// The second operand where the mask is set.
template <typename T, unsigned N>
vector<T, N> select(const vector<T, N> &a, const vector<T, N> &b, const mask<N> &m) {
  return each<T, N>([&](unsigned i) { return m.lanes[i] ? b.lanes[i] : a.lanes[i]; });
}

// `v` is a matrix of `rows` rows.
template <typename T, unsigned N>
vector<T, N> transpose(const vector<T, N> &v, unsigned rows, unsigned columns) {
  return each<T, N>([&](unsigned i) { return v.lanes[i % rows * columns + i / rows]; });
}

template <typename T, unsigned N>
vector<T, N> shuffle_down_rotate(const vector<T, N> &v, unsigned by) {
  return each<T, N>([&](unsigned i) { return v.lanes[(i + by) % N]; });
}

template <typename T, unsigned N>
vector<T, 2 * N> concat(const vector<T, N> &a, const vector<T, N> &b) {
  return each<T, 2 * N>([&](unsigned i) { return i < N ? a.lanes[i] : b.lanes[i - N]; });
}

// `step` lanes of each in turn; the first and the second half of the result.
template <typename T, unsigned N>
std::pair<vector<T, N>, vector<T, N>> interleave_zip(const vector<T, N> &a, const vector<T, N> &b, unsigned step) {
  const auto zipped = [&](unsigned i) {
    const unsigned from = i / (2 * step) * step + i % step;
    return i / step % 2 == 0 ? a.lanes[from] : b.lanes[from];
  };
  return {each<T, N>(zipped), each<T, N>([&](unsigned i) { return zipped(N + i); })};
}

// Rounded down, with `shift` fractional bits.
template <typename To, typename T, unsigned N>
vector<To, N> to_fixed(const vector<T, N> &v, int shift) {
  return each<To, N>([&](unsigned i) { return To(std::floor(std::ldexp(float(v.lanes[i]), shift))); });
}

template <unsigned N>
vector<float, N> to_float(const vector<int32, N> &v, int shift) {
  return each<float, N>([&](unsigned i) { return std::ldexp(float(v.lanes[i]), -shift); });
}

// Eight entries, and the same eight again; both tables alike.
template <unsigned Reads, typename Value, typename Slope = Value>
struct lut {
  const Value *ab, *cd;
  unsigned entries;

  lut(unsigned entries, const Value *ab, const Value *cd) : ab(ab), cd(cd), entries(entries) {}

  Value at(unsigned i) const {
    const unsigned where = i / 8 * 16 + i % 8;
    for (const Value *copy : {ab + where + 8, cd + where, cd + where + 8})
      if (std::memcmp(copy, ab + where, sizeof(Value)) != 0)
        std::abort();
    return ab[where];
  }
};

template <typename Index, typename Lut, lut_oor_policy Policy>
struct parallel_lookup {
  const Lut &table;
  unsigned step_bits;

  parallel_lookup(const Lut &table, unsigned step_bits) : table(table), step_bits(step_bits) {}

  template <unsigned N>
  vector<bfloat16, N> fetch(const vector<Index, N> &v) const {
    static_assert(Policy == lut_oor_policy::truncate);
    if (current_rounding != rounding_mode::floor)
      std::abort();
    const unsigned last = table.entries - 1;
    return each<bfloat16, N>([&](unsigned i) { return table.at(unsigned(v.lanes[i]) >> step_bits & last); });
  }
};

// `rows` x `depth` times `depth` x `columns`, in row-major order.
template <unsigned Rows, unsigned Depth, unsigned Columns, typename A, typename B, typename Tag>
struct mmul {
  static constexpr unsigned size_A = Rows * Depth;
  static constexpr unsigned size_B = Depth * Columns;
  static constexpr unsigned size_C = Rows * Columns;
  vector<float, size_C> sums;

  mmul() = default;
  explicit mmul(const vector<float, size_C> &from) : sums(from) {}

  void mul(const vector<A, size_A> &a, const vector<B, size_B> &b) {
    sums = zeros<float, size_C>();
    mac(a, b);
  }

  void mac(const vector<A, size_A> &a, const vector<B, size_B> &b) {
    for (unsigned r = 0; r < Rows; r++)
      for (unsigned c = 0; c < Columns; c++)
        for (unsigned i = 0; i < Depth; i++)
          sums.lanes[r * Columns + c] += float(a.lanes[r * Depth + i]) * float(b.lanes[i * Columns + c]);
  }

  template <typename T>
  vector<T, size_C> to_vector() const {
    return sums;
  }
};

}  // namespace aie
