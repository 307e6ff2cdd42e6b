// An implementation of attention.comp in which subgroups multiply tiles of f16 (tile.glsl). Queries, keys, values and
// weights are rounded to f16, sums are f32. So the results differ from those of attention_by_lanes.glsl, and a model uses
// one of the two for all its tokens.
//
// The workgroup has ROWS rows. The rows after the item's last one repeat it, and are not stored. For each TILE of keys:
//
//   scores = queries x keys. 64 dimensions (CHUNK) of all keys are in shared memory at a time;
//   four invocations compute the weights of a row, relative to its largest score so far. A key that a row does not see
//   has the weight 0;
//   acc = acc * correction + weights x values, again for 64 dimensions at a time. Shared memory has them transposed:
//   subgroups load the factors of a sum from neighbouring addresses.
//
// Each chunk is loaded from memory while subgroups multiply the previous one. The order of a row's sums depends only on
// the keys that it sees: one row's product is the same in any row of any tile.
#include "invocation.glsl"

layout(constant_id = 3) const uint TILE_M = 16;
layout(constant_id = 4) const uint TILE_N = 16;
layout(constant_id = 5) const uint TILE_K = 16;
layout(constant_id = 6) const uint WAVES_M = 2;
layout(constant_id = 7) const uint WAVES_N = 2;
#define FACTORS_F16
#include "tile.glsl"

const uint INVOCATIONS = 128;
// Chunks of a head's dimensions. The dimensions after the head's last one are zeros.
const uint CHUNK = 64, CHUNK_FOURS = CHUNK / 4;
const uint CHUNKS = (HEAD_DIM + CHUNK - 1) / CHUNK;
const bool IS_WHOLE = HEAD_DIM % CHUNK == 0;
// Numbers of tiles of one subgroup: of rows, and of keys or of a chunk's dimensions.
const uint TILES_M = ROWS / WAVES_M / TILE_M, TILES_N = TILE / WAVES_N / TILE_N;
const uint ALL_TILES_N = CHUNKS * TILES_N;
// All strides count uvec2s of four f16 or two f32. They are multiples of 16 bytes, and spread rows over the memory banks.
const uint STRIDE = TILE / 4 + 2, F32_STRIDE = TILE / 2 + 2, Q_STRIDE = CHUNKS * CHUNK_FOURS + 2;
const uint STEPS = TILE / TILE_K, STEP = TILE_K / 4;

const uint QUERY_WORDS = ROWS * Q_STRIDE, WEIGHT_WORDS = ROWS * STRIDE, STAGED_WORDS = TILE * STRIDE;
shared uvec2 queries[QUERY_WORDS];
shared uvec2 weights[WEIGHT_WORDS];
// A chunk of keys [key][dimension], or of values [dimension][key]; or f32 of all rows: scores, or results of a chunk.
shared uvec2 staged[STAGED_WORDS];
shared float corrections[ROWS];
// Largest score and sum of weights of a row, over a split and over all previous splits.
shared vec2 split_score[ROWS];
shared vec2 joined[ROWS];
// For each key of a tile, where its value starts.
shared uint value_rows[TILE];
#if defined(KV_INT8)
shared float key_scales[TILE];
shared uint value_scales[TILE]; // f16, twice
#endif

#if defined(COOPERATIVE)
#define FOR_CHUNKS(c) [[unroll]] for (uint c = 0; c < CHUNKS; c++)
#else
// Not unrolled, because compilers for CPUs are slow with many barriers.
#define FOR_CHUNKS(c) [[dont_unroll]] for (uint c = 0; c < CHUNKS; c++)
#endif

// What an invocation moves of a chunk: 32 dimensions of a key, in units of the cache; or 8 dimensions of the values of
// four keys.
struct Moved { uvec4 at[4]; };

// The keys of a split.
struct Keys {
    uint kv_head;
    // The first and the last key that a row of the item sees.
    uint from;
    uint to;
    // Where the sequence's blocks begin in the block tables.
    uint table;
};

uvec2 halves(vec4 four) { return uvec2(packHalf2x16(four.xy), packHalf2x16(four.zw)); }

#if defined(KV_INT8)
// Two integers from -128 to 127 as f16, which has them exactly: with 128 added they are the lowest bits of 1024 + 128 + i.
f16vec2 two_of(uint two) { return unpackFloat2x16(two & 0x00ff00ffu | 0x64006400u) - f16vec2(1152.0); }
// The integers of a word in the order 0, 2, 1, 3.
f16vec2[2] four_of_int8(uint four) {
    const uint biased = four ^ 0x80808080u;
    return f16vec2[2](two_of(biased), two_of(biased >> 8));
}
// The order of a four's dimensions in `queries`: that of keys.
vec4 ordered(vec4 four) { return four.xzyw; }
#else
vec4 ordered(vec4 four) { return four; }
#endif

// Finds the invocation's key of a tile, and returns where it starts. The memory of keys that no row sees may be
// uninitialized, so the split's first key stands for the keys before it, and the last one for those after it: their
// weights are 0.
uint find_key(Keys keys, uint tile, uint lane) {
    const uint slot = lane % TILE, key = clamp(tile + slot, keys.from, keys.to);
    const uint block = block_tables.at[keys.table + key / block_size], token = key % block_size;
    const uint rows = num_kv_heads * block_size, start = cache_block(block, rows, FOURS);
    if (lane < TILE) {
        value_rows[slot] = value_at(start, keys.kv_head, token, 0, block_size, FOURS);
#if defined(KV_INT8)
        const uint scale_at = cache_scale_at(start, keys.kv_head, token, block_size, rows, FOURS);
        key_scales[slot] = uintBitsToFloat(k_cache.at[scale_at]);
        value_scales[slot] = packHalf2x16(vec2(uintBitsToFloat(v_cache.at[scale_at])));
#endif
    }
    return key_at(start, keys.kv_head, token, 0, block_size, FOURS);
}

Moved load_keys(uint key_start, uint chunk, uint lane) {
    Moved moved;
    const uint first = lane / TILE;
#if defined(KV_F16)
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const uint unit = chunk * 8 + 2 * i;
        const uint at = key_start / 2 + first * block_size + unit * block_size;
        moved.at[i] = IS_WHOLE || 2 * (unit + first) < FOURS ? k_cache.at[at] : uvec4(0);
    }
#elif defined(KV_INT8)
    [[unroll]] for (uint i = 0; i < 2; i++) {
        const uint unit = chunk * 4 + 2 * i;
        const uint at = key_start / 4 + first * block_size + unit * block_size;
        moved.at[i] = IS_WHOLE || 4 * (unit + first) < FOURS ? ReadUvec4s(uvec2(k_cache)).at[at] : uvec4(0);
    }
#endif
    return moved;
}

void store_keys(Moved moved, uint lane) {
    const uint first = lane / TILE, at = lane % TILE * STRIDE;
#if defined(KV_F16)
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const uint unit_at = at + 2 * (first + 2 * i);
        staged[unit_at] = moved.at[i].xy;
        staged[unit_at + 1] = moved.at[i].zw;
    }
#elif defined(KV_INT8)
    // Integers of one byte are exact in f16. The scale is a factor of the score.
    [[unroll]] for (uint i = 0; i < 2; i++)
        [[unroll]] for (uint w = 0; w < 4; w++) {
            const f16vec2 four[2] = four_of_int8(moved.at[i][w]);
            staged[at + 4 * (first + 2 * i) + w] = uvec2(packFloat2x16(four[0]), packFloat2x16(four[1]));
        }
#endif
}

Moved load_values(uint chunk, uint lane) {
    Moved moved;
    const uint group = lane % CHUNK_FOURS, four = chunk * CHUNK_FOURS + lane / CHUNK_FOURS * 2;
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const uint at = value_rows[4 * group + i] + four;
#if defined(KV_F16)
        moved.at[i] = IS_WHOLE || four < FOURS ? v_cache.at[at / 2] : uvec4(0);
#elif defined(KV_INT8)
        const bool is_read = IS_WHOLE || four < FOURS;
        moved.at[i] = is_read ? uvec4(ReadUvec2s(uvec2(v_cache)).at[at / 2], 0, 0) : uvec4(0);
#endif
    }
    return moved;
}

// The lower halves of two words, or the higher ones. Compilers have an instruction for this form.
uint pair(uint a, uint b, bool high) {
    const f16vec2 x = unpackFloat2x16(a), y = unpackFloat2x16(b);
    return packFloat2x16(high ? f16vec2(x.y, y.y) : f16vec2(x.x, y.x));
}

void store_values(Moved moved, uint lane) {
    const uint group = lane % CHUNK_FOURS, at = lane / CHUNK_FOURS * 8 * STRIDE + group;
    uvec4 rows[4];
    [[unroll]] for (uint i = 0; i < 4; i++) {
#if defined(KV_F16)
        rows[i] = moved.at[i];
#elif defined(KV_INT8)
        const f16vec2 scale = unpackFloat2x16(value_scales[4 * group + i]);
        [[unroll]] for (uint w = 0; w < 2; w++) {
            const f16vec2 four[2] = four_of_int8(moved.at[i][w]);
            rows[i][2 * w] = packFloat2x16(four[0] * scale);
            rows[i][2 * w + 1] = packFloat2x16(four[1] * scale);
        }
#endif
    }
    [[unroll]] for (uint d = 0; d < 8; d++) {
#if defined(KV_INT8)
        const uint w = d / 4 * 2 + d % 2;
        const bool high = d % 4 >= 2;
#else
        const uint w = d / 2;
        const bool high = d % 2 == 1;
#endif
        staged[at + d * STRIDE] = uvec2(pair(rows[0][w], rows[1][w], high), pair(rows[2][w], rows[3][w], high));
    }
}

// The largest of four neighbouring invocations' values.
float largest_of_four(float value) {
    value = max(value, subgroupShuffleXor(value, 1));
    return max(value, subgroupShuffleXor(value, 2));
}

void main() {
    const Item item = items.at[gl_WorkGroupID.x];
    const uint kv_head = first_kv_head + gl_WorkGroupID.y;
    const uint lane = own_invocation(), rows = item.tokens * GROUP;
    const uint wave_row = WAVE % WAVES_M * (ROWS / WAVES_M), wave_column = WAVE / WAVES_M * (TILE / WAVES_N);

    for (uint i = lane; i < ROWS * CHUNKS * CHUNK_FOURS; i += INVOCATIONS) {
        const uint row = i / (CHUNKS * CHUNK_FOURS), four = i % (CHUNKS * CHUNK_FOURS);
        const uint token = item.token + min(row / GROUP, item.tokens - 1);
        const uint of = (token * num_kv_heads + kv_head) * GROUP + row % GROUP;
        queries[row * Q_STRIDE + four] = four < FOURS ? halves(ordered(q.at[of * FOURS + four])) : uvec2(0);
    }

    // The row whose weights this invocation computes, which quarter of them, and the keys that the row sees.
    const uint own_row = lane / 4, quarter = lane % 4;
    const uint own_token = min(own_row / GROUP, item.tokens - 1);
    const uint own_first = first_seen(item, own_token), own_last = last_seen(item, own_token);
    const uint lowest = first_seen(item, 0), highest = last_seen_by_any(item);

    [[dont_unroll]] for (uint n = 0; n < item.splits; n++) {
        const uint split = item.first_split + n;
        Keys keys;
        keys.kv_head = kv_head;
        keys.from = max(split_start(split, split_unit, window == 0), lowest);
        keys.to = min(split_start(split + 1, split_unit, window == 0) - 1, highest);
        keys.table = item.sequence * max_blocks;
        const uint seen_from = max(own_first, keys.from), seen_end = min(own_last, keys.to) + 1;
        const uint seen = seen_end > seen_from ? seen_end - seen_from : 0;
        float maximum = LOWEST, sum = 0.0;
        TileSum acc[TILES_M][ALL_TILES_N];
        [[unroll]] for (uint r = 0; r < TILES_M; r++)
            for (uint c = 0; c < ALL_TILES_N; c++) CLEAR(acc[r][c]);

        uint tile = keys.from / TILE * TILE, key_start = find_key(keys, tile, lane);
        Moved next = load_keys(key_start, 0, lane);
        [[dont_unroll]] for (; tile <= keys.to; tile += TILE) {
            TileSum scores[TILES_M][TILES_N];
            [[unroll]] for (uint r = 0; r < TILES_M; r++)
                [[unroll]] for (uint c = 0; c < TILES_N; c++) CLEAR(scores[r][c]);
            FOR_CHUNKS(chunk) {
                barrier();
                store_keys(next, lane);
                barrier();
                if (chunk + 1 < CHUNKS) next = load_keys(key_start, chunk + 1, lane);
                else next = load_values(0, lane);
                [[unroll]] for (uint r = 0; r < TILES_M; r++) {
                    const uint a_at = (wave_row + r * TILE_M) * Q_STRIDE + chunk * CHUNK_FOURS;
                    [[unroll]] for (uint k = 0; k < STEPS; k++) {
                        TileA a;
                        LOAD_A(a, queries, a_at + k * STEP, Q_STRIDE);
                        [[unroll]] for (uint c = 0; c < TILES_N; c++) {
                            TileB b;
                            LOAD_B(b, staged, (wave_column + c * TILE_N) * STRIDE + k * STEP, STRIDE);
                            MULTIPLY_ADD(scores[r][c], a, b);
                        }
                    }
                }
            }

            barrier();
            [[unroll]] for (uint r = 0; r < TILES_M; r++)
                [[unroll]] for (uint c = 0; c < TILES_N; c++) {
                    const uint at = (wave_row + r * TILE_M) * F32_STRIDE + (wave_column + c * TILE_N) / 2;
                    STORE_ROWS(scores[r][c], staged, at, F32_STRIDE);
                }
            barrier();
            if (own_row < ROWS) {
                float score[16];
                float largest = LOWEST;
                // A key before `seen_from` is far beyond `seen`.
                const uint quarter_start = tile + quarter * 16 - seen_from;
                [[unroll]] for (uint i = 0; i < 8; i++) {
                    const uvec2 two = staged[own_row * F32_STRIDE + quarter * 8 + i];
                    [[unroll]] for (uint j = 0; j < 2; j++) {
                        const uint key = i * 2 + j;
                        float product = uintBitsToFloat(two[j]);
#if defined(KV_INT8)
                        product *= key_scales[quarter * 16 + key];
#endif
                        score[key] = quarter_start + key < seen ? product : LOWEST;
                        largest = max(largest, score[key]);
                    }
                }
                largest = max(maximum, largest_of_four(largest));
                // Relative to this, the weight of a key that is not seen is 0 even if the row has seen none yet.
                const float reference = max(largest, LOWEST / 2.0);
                const float correction = weight_of(maximum, largest);
                if (quarter == 0) corrections[own_row] = correction;
                maximum = largest;
                sum *= correction;
                [[unroll]] for (uint i = 0; i < 4; i++) {
                    uvec2 four;
                    [[unroll]] for (uint j = 0; j < 2; j++) {
                        vec2 two;
                        [[unroll]] for (uint e = 0; e < 2; e++) two[e] = weight_of(score[i * 4 + j * 2 + e], reference);
                        four[j] = packHalf2x16(two);
                        // What is added up is what is multiplied.
                        const vec2 rounded = unpackHalf2x16(four[j]);
                        sum = sum + rounded.x + rounded.y;
                    }
                    weights[own_row * STRIDE + quarter * 4 + i] = four;
                }
            }

            FOR_CHUNKS(chunk) {
                barrier();
                store_values(next, lane);
                barrier();
                if (chunk + 1 < CHUNKS) {
                    next = load_values(chunk + 1, lane);
                } else if (tile + TILE <= keys.to) {
                    key_start = find_key(keys, tile + TILE, lane);
                    next = load_keys(key_start, 0, lane);
                }
                [[unroll]] for (uint r = 0; r < TILES_M; r++) {
                    TileA a[STEPS];
                    const uint a_at = (wave_row + r * TILE_M) * STRIDE;
                    [[unroll]] for (uint k = 0; k < STEPS; k++) LOAD_A(a[k], weights, a_at + k * STEP, STRIDE);
                    TileFloat correction;
                    LOAD_ROWS(correction, corrections, wave_row + r * TILE_M);
                    [[unroll]] for (uint c = 0; c < TILES_N; c++) {
                        EACH(e) acc[r][chunk * TILES_N + c][e] *= correction[e];
                        [[unroll]] for (uint k = 0; k < STEPS; k++) {
                            TileB b;
                            LOAD_B(b, staged, (wave_column + c * TILE_N) * STRIDE + k * STEP, STRIDE);
                            MULTIPLY_ADD(acc[r][chunk * TILES_N + c], a[k], b);
                        }
                    }
                }
            }
        }

        // The sums of the four quarters, in their order.
        float total = sum;
        [[unroll]] for (uint i = 0; i < 4; i++) {
            const float other = subgroupShuffle(sum, (gl_SubgroupInvocationID & ~3u) + i);
            total = i == 0 ? other : total + other;
        }
        if (own_row < ROWS && quarter == 0) split_score[own_row] = vec2(maximum, total);
        FOR_CHUNKS(chunk) {
            barrier();
            [[unroll]] for (uint r = 0; r < TILES_M; r++)
                [[unroll]] for (uint c = 0; c < TILES_N; c++) {
                    const uint at = (wave_row + r * TILE_M) * F32_STRIDE + (wave_column + c * TILE_N) / 2;
                    STORE_ROWS(acc[r][chunk * TILES_N + c], staged, at, F32_STRIDE);
                }
            barrier();
            for (uint i = lane; i < ROWS * CHUNK_FOURS; i += INVOCATIONS) {
                const uint row = i / CHUNK_FOURS, in_chunk = i % CHUNK_FOURS, four = chunk * CHUNK_FOURS + in_chunk;
                if (row >= rows || four >= FOURS) continue;
                const uint from = row * F32_STRIDE + 2 * in_chunk;
                const vec4 values = vec4(uintBitsToFloat(staged[from]), uintBitsToFloat(staged[from + 1]));
                const uint at = partial_at(item, kv_head, row) * (FOURS + 1);
                store_partial(at, four, n, joined[row], values, split_score[row]);
            }
        }
        barrier();
        if (lane < ROWS) {
            vec4 unused = vec4(0.0);
            vec2 score = split_score[lane];
            if (n > 0) {
                score = joined[lane];
                join(unused, score, vec4(0.0), split_score[lane]);
            }
            joined[lane] = score;
        }
    }
}
