// The core's part of attention on an NPU of a Ryzen AI 7040 or 8040 (AIE2), in C++ with AMD's aie_api.
//
// Unverified source: never compiled for AIE2, and never run on an NPU. Its toolchain (mlir-aie and Peano) is not
// available where this project's tests run. A test compiles it for the host with a stand-in for aie_api.
// src/npu/tile.rs has the arithmetic step by step, and the bound on its error. npu/kernels/schedule.py has the program
// that calls these functions, and their order.
//
// Compile it with -DHEAD_DIM (64, 128 or 256), -DTILE (32, 32 or 16), -DPASS_ROWS and -DWALK_STEP: schedule.py's
// `tile`, `pass_rows` and `walk_step`. exp_tables.h is the output of tables.py.
//
// Tensors in the core's memory, as the matrix unit reads them (`aie::mmul<4, 8, 4>` of bf16):
//
//     queries   [TILE / 4][HEAD_DIM / 8][4][8]   bf16, scaled: a score is Q.K
//     keys      [TILE / 4][HEAD_DIM / 8][4][8]   bf16
//     values    [TILE / 8][HEAD_DIM / 4][8][4]   bf16
//     output    [TILE / 4][HEAD_DIM / 4][4][4]   f32
//     sums      [TILE / 4][4][4]                 f32, l of each row four times
//     exponents [TILE / 4][4][4]                 int32, n of each row four times
//     scores    [TILE / 4][4][4]                 f32, of four rows (a band) at a time
//     weights   [TILE / 8][4][8]                 bf16, of the same band
//     state     [32]                             int32: the parameters, and where in the job the core is

#include <stdint.h>

#include <aie_api/aie.hpp>

#include "exp_tables.h"

namespace {

constexpr int BANDS = TILE / 4;
constexpr int KEY_TILES = TILE / 4;
constexpr int WEIGHT_TILES = TILE / 8;
constexpr int DEPTH_TILES = HEAD_DIM / 8;
constexpr int WIDTH_TILES = HEAD_DIM / 4;

static_assert(HEAD_DIM % 8 == 0 && TILE % 8 == 0, "the matrix unit multiplies 4 x 8 by 8 x 4");

constexpr float LOG2_E = 1.44269504f;
constexpr float LN_2 = 0.69314718f;
// The smallest argument of the exponential. bf16 represents it exactly.
constexpr float LOWEST = -80.0f;
// The score of a key that the row does not see, and a threshold that every visible score exceeds.
constexpr float HIDDEN = -1073741824.0f;
constexpr float ABOVE_HIDDEN = -536870912.0f;
// The exponent of a row that has seen no key. It is below the exponent of any score.
constexpr int32_t NO_EXPONENT = -(1 << 26);

// Words of `state`: the parameters of the job, then the core's position in it.
enum State {
  REAL_KEYS = 8,
  ROW_0 = 9,
  KEY_0 = 10,
  WINDOW = 11,
  // The first row of the core's block, the first key of the pass, the first key of the next tile.
  ROW = 16,
  PASS_KEY = 17,
  KEY = 18,
};

using Mmul = aie::mmul<4, 8, 4, bfloat16, bfloat16, accauto>;
using Numbers = aie::vector<float, 16>;
using Integers = aie::vector<int32, 16>;
using Lanes = aie::mask<16>;

// exp of 16 numbers from LOWEST to a little above 0, rounded to bf16.
inline aie::vector<bfloat16, 16> exponential(aie::vector<bfloat16, 16> x) {
  using Table = aie::lut<4, bfloat16, bfloat16>;
  using Lookup = aie::parallel_lookup<uint16, Table, aie::lut_oor_policy::truncate>;
  const Table whole(256, (const bfloat16 *)exp_whole_ab, (const bfloat16 *)exp_whole_cd);
  const Table part(256, (const bfloat16 *)exp_part_ab, (const bfloat16 *)exp_part_cd);
  // The lookup shifts its index, and must round it down.
  aie::set_rounding(aie::rounding_mode::floor);
  Lookup look_whole(whole, 8);
  Lookup look_part(part, 0);
  const aie::vector<uint16, 16> fixed = aie::to_fixed<int16>(x, 8).cast_to<uint16>();
  const aie::vector<bfloat16, 16> whole_exp = look_whole.fetch(fixed);
  const aie::vector<bfloat16, 16> part_exp = look_part.fetch(fixed);
  aie::set_rounding(aie::rounding_mode::conv_even);
  return aie::mul(whole_exp, part_exp).to_vector<bfloat16>();
}

// x / 2^by, by subtraction from the bits of the exponents; 0 if the exponent gets too small. `by` is 0 to 255.
inline Numbers divided(Numbers x, Integers by) {
  const Integers bits = x.cast_to<int32>();
  const Integers exponent = aie::bit_and((int32)0x7f800000, bits);
  const Integers taken = aie::upshift(by, 23);
  const Lanes is_left = aie::gt(exponent, taken);
  return aie::select(aie::zeros<int32, 16>(), aie::sub(bits, taken), is_left).cast_to<float>();
}

// The maximum of each row of a 4 x 4 tile, in all four lanes of the row.
inline Numbers row_max(Numbers x) {
  Numbers columns = aie::transpose(x, 4, 4);
  columns = aie::max(columns, aie::shuffle_down_rotate(columns, 4));
  columns = aie::max(columns, aie::shuffle_down_rotate(columns, 8));
  return aie::transpose(columns, 4, 4);
}

// 1 / x for normal x > 0. AIE2 has no float division. The first guess, from the exponent's bits, has an error of 12 %,
// and each Newton step squares the error.
inline Numbers inverse(Numbers x) {
  const Numbers two = aie::broadcast<float, 16>(2.0f);
  Numbers r = aie::sub(aie::broadcast<int32, 16>(0x7ef311c7), x.cast_to<int32>()).cast_to<float>();
  for (int i = 0; i < 4; i++) {
    const Numbers product = aie::mul(x, r).to_vector<float>();
    r = aie::mul(r, aie::sub(two, product)).to_vector<float>();
  }
  return r;
}

// 0 1 2 3 0 1 2 3 ..., and 0 0 0 0 1 1 1 1 ...: the key and the row of each lane of a tile of scores.
alignas(aie::vector_decl_align) const int32 LANE_KEY[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
alignas(aie::vector_decl_align) const int32 LANE_ROW[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};

// The lanes whose row sees their key. `row` and `key` are the first ones of the tile of scores, counted in the job.
inline Lanes seen(const int32 *state, int32 row, int32 key) {
  const Integers keys = aie::add(aie::load_v<16>(LANE_KEY), key);
  const Integers row_positions = aie::add(aie::load_v<16>(LANE_ROW), row + state[ROW_0]);
  const Integers key_positions = aie::add(keys, state[KEY_0]);
  Lanes lanes = aie::lt(keys, state[REAL_KEYS]) & aie::le(key_positions, row_positions);
  if (state[WINDOW] != 0)
    lanes = lanes & aie::gt(aie::add(key_positions, state[WINDOW]), row_positions);
  return lanes;
}

// Scores of four rows with the tile's keys, and the maximum of each lane.
inline Numbers score_band(const bfloat16 *queries, const bfloat16 *keys, float *scores, const int32 *state, int32 row,
                          int32 key, bool all_seen) {
  Numbers largest = aie::broadcast<float, 16>(HIDDEN);
  for (int t = 0; t < KEY_TILES; t++) {
    const bfloat16 *q = queries;
    const bfloat16 *k = keys + t * DEPTH_TILES * Mmul::size_B;
    Mmul sum;
    sum.mul(aie::load_v<32>(q), aie::transpose(aie::load_v<32>(k), 4, 8));
    for (int i = 1; i < DEPTH_TILES; i++) {
      q += Mmul::size_A;
      k += Mmul::size_B;
      sum.mac(aie::load_v<32>(q), aie::transpose(aie::load_v<32>(k), 4, 8));
    }
    Numbers s = sum.to_vector<float>();
    if (!all_seen)
      s = aie::select(aie::broadcast<float, 16>(HIDDEN), s, seen(state, row, key + 4 * t));
    aie::store_v(scores + t * 16, s);
    largest = aie::max(largest, s);
  }
  return largest;
}

// Raises the band's exponents to the exponents of its scores, and divides the sums and outputs that are relative to
// them.
inline Integers raise(Numbers largest, int32 *exponents, float *sums, float *output) {
  const Numbers power = aie::mul(row_max(largest), LOG2_E).to_vector<float>();
  const Integers old = aie::load_v<16>(exponents);
  const Integers n = aie::max(old, aie::add(aie::to_fixed<int32>(power, 0), (int32)1));
  if (!aie::gt(n, old).empty()) {
    const Integers by = aie::min(aie::sub(n, old), (int32)255);
    aie::store_v(exponents, n);
    aie::store_v(sums, divided(aie::load_v<16>(sums), by));
    for (int i = 0; i < WIDTH_TILES; i++)
      aie::store_v(output + i * 16, divided(aie::load_v<16>(output + i * 16), by));
  }
  return n;
}

// exp(s - n ln 2) of one tile of scores; 0 where the row does not see the key.
inline aie::vector<bfloat16, 16> weigh(const float *scores, Numbers reference) {
  const Numbers s = aie::load_v<16>(scores);
  aie::accum<accfloat, 16> difference;
  difference.from_vector(aie::sub(s, reference));
  const auto argument = aie::max(difference.to_vector<bfloat16>(), (bfloat16)LOWEST);
  return aie::select(aie::zeros<bfloat16, 16>(), exponential(argument), aie::gt(s, ABOVE_HIDDEN));
}

}  // namespace

extern "C" {

// Reads the parameters from the dispatch's first object. The layout of keys has put each group of four words 16 words
// after the previous group. `block` is the index of this core's block among the head's blocks of a pass.
void attention_begin(const bfloat16 *object, int32 *state, int32 block) {
  const int32 *words = (const int32 *)object;
  for (int i = 0; i < 16; i++)
    state[i] = words[i / 4 * 16 + i % 4];
  state[ROW] = block * TILE - PASS_ROWS;
  state[PASS_KEY] = -WALK_STEP * TILE;
}

void attention_queries(const bfloat16 *object, bfloat16 *queries) {
  for (int i = 0; i < TILE * HEAD_DIM; i += 32)
    aie::store_v(queries + i, aie::load_v<32>(object + i));
}

void attention_begin_pass(float *output, float *sums, int32 *exponents, int32 *state) {
  state[ROW] += PASS_ROWS;
  state[PASS_KEY] += WALK_STEP * TILE;
  state[KEY] = state[PASS_KEY];
  const Numbers zeros = aie::zeros<float, 16>();
  for (int i = 0; i < BANDS; i++) {
    aie::store_v(sums + i * 16, zeros);
    aie::store_v(exponents + i * 16, aie::broadcast<int32, 16>(NO_EXPONENT));
  }
  for (int i = 0; i < TILE * HEAD_DIM; i += 16)
    aie::store_v(output + i, zeros);
}

void attention_tile(const bfloat16 *keys, const bfloat16 *values, float *output, const bfloat16 *queries, float *sums,
                    int32 *exponents, float *scores, bfloat16 *weights, int32 *state) {
  const int32 row = state[ROW], key = state[KEY], window = state[WINDOW];
  state[KEY] = key + TILE;
  const int32 row_position = row + state[ROW_0], key_position = key + state[KEY_0];
  const int32 last_row = row_position + TILE - 1, last_key = key_position + TILE - 1;
  // No row sees a key of this tile: it is after all rows, or a window before them, or not real.
  if (key >= state[REAL_KEYS] || key_position > last_row || (window != 0 && last_key + window <= row_position))
    return;
  const bool all_seen = key + TILE <= state[REAL_KEYS] && last_key <= row_position &&
                        (window == 0 || key_position + window > last_row);

  aie::set_rounding(aie::rounding_mode::conv_even);
  const auto ones = aie::broadcast<bfloat16, 32>((bfloat16)1.0f);
  for (int band = 0; band < BANDS; band++) {
    float *band_output = output + band * WIDTH_TILES * 16;
    float *band_sums = sums + band * 16;
    const Numbers largest = score_band(queries + band * DEPTH_TILES * Mmul::size_A, keys, scores, state, row + 4 * band,
                                       key, all_seen);
    const Integers n = raise(largest, exponents + band * 16, band_sums, band_output);
    const Numbers reference = aie::mul(aie::to_float(n, 0), LN_2).to_vector<float>();

    // Two 4 x 4 tiles of weights form one 4 x 8 tile of the matrix unit: four numbers of each row in turn.
    Mmul sum(aie::load_v<16>(band_sums));
    for (int t = 0; t < WEIGHT_TILES; t++) {
      const auto left = weigh(scores + 2 * t * 16, reference);
      const auto right = weigh(scores + (2 * t + 1) * 16, reference);
      const auto [top, bottom] = aie::interleave_zip(left, right, 4);
      const aie::vector<bfloat16, 32> p = aie::concat(top, bottom);
      aie::store_v(weights + t * 32, p);
      sum.mac(p, ones);
    }
    aie::store_v(band_sums, sum.to_vector<float>());

    for (int i = 0; i < WIDTH_TILES; i++) {
      Mmul o(aie::load_v<16>(band_output + i * 16));
      for (int t = 0; t < WEIGHT_TILES; t++)
        o.mac(aie::load_v<32>(weights + t * 32), aie::load_v<32>(values + (t * WIDTH_TILES + i) * 32));
      aie::store_v(band_output + i * 16, o.to_vector<float>());
    }
  }
}

// A row that has seen no key is not a row of the job, and its output is not read.
void attention_finish(float *output, const float *sums) {
  for (int band = 0; band < BANDS; band++) {
    const Numbers r = inverse(aie::load_v<16>(sums + band * 16));
    for (int i = 0; i < WIDTH_TILES; i++) {
      float *o = output + (band * WIDTH_TILES + i) * 16;
      aie::store_v(o, aie::mul(aie::load_v<16>(o), r).to_vector<float>());
    }
  }
}

}  // extern "C"
