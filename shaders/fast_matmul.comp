// y[t, r] = sum over k of x[t, k] * W[r, k], x quantized: what `fast` means (common/fast.glsl, which gives the order of sums)
//
//   W  up to three matrices [rows, cols], packed (common/weights.glsl), which meet the same x
//   x  int8 blocks of `tokens` rows, padded to x_stride       y  f32 [tokens, rows] of each matrix, rows y_stride apart
//
// GEGLU takes two matrices of one shape, gate and up: y0 and y1_or_none are then blocks and scales of gelu_tanh(gate) * up,
// quantized, for as many padded rows as x has.
//
// A workgroup computes 32 rows by COLUMNS tokens. Each of its subgroups, or of what several small ones make up, takes a
// segment of the columns: lane = row, so that an activation is the same for all lanes and can come from a scalar register.
// Weights are read once for COLUMNS tokens. More of them take several passes: x counts passes that go together, z groups of
// such passes. Workgroups that need the same weights stand side by side, so that memory gives them once.
// Spare columns read what pads x, and are not stored.
//
// ON_CPU: for a device that is a CPU, which has no scalar registers, no dot products of packed bytes, and little use for
// invocations that wait for each other. A workgroup computes ROW_TILES x 32 rows, one segment after another, and several
// tiles use what was unpacked of an activation. There is no GEGLU.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_ballot : require
#extension GL_EXT_integer_dot_product : require
#include "memory.glsl"
#include "weights.glsl"
#include "fast.glsl"
#include "gelu.glsl"

layout(constant_id = 0) const uint COLUMNS = 1;
#if defined(ON_CPU)
#define IN_F32
layout(local_size_x = 32) in;
layout(constant_id = 1) const uint ROW_TILES = 1;
#else
layout(local_size_x = 32, local_size_y = SEGMENTS) in;
layout(constant_id = 1) const uint GEGLU = 0;
const uint ROW_TILES = 1;
#endif
// Blocks of weights that share one scale (common/weights.glsl).
layout(constant_id = 2) const uint SCALE_BLOCKS = 1;
#include "fold.glsl"

layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer WriteWords { uint at[]; };

layout(push_constant, std430) uniform Push {
    Blocks blocks0;
    Blocks blocks1_or_none;
    Blocks blocks2_or_none;
    Scales scales0;
    Scales scales1_or_none;
    Scales scales2_or_none;
    WriteWords y0;
    WriteWords y1_or_none;
    WriteWords y2_or_none;
    ActivationBlocks x;
    ActivationScales x_scales;
    uint rows0;
    uint rows1;
    uint rows2;
    uint y0_stride;
    uint y1_stride;
    uint y2_stride;
    uint cols;
    uint tokens;
    uint x_stride;
};

uint tiles_of(uint rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
uint parts_of(uint rows) { return (tiles_of(rows) + ROW_TILES - 1) / ROW_TILES; }

// A part of a matrix, of ROW_TILES tiles of rows, and where its product goes.
struct Part {
    Blocks blocks;
    Scales scales;
    WriteWords y;
    uint rows;
    uint y_stride;
    uint first_tile;
};

// The parts of all matrices stand behind each other; those of two that GeGLU takes, in one place.
Part part_of(uint index) {
#if !defined(ON_CPU)
    if (GEGLU == 1) return Part(blocks0, scales0, y0, rows0, y0_stride, index);
#endif
    const uint parts0 = parts_of(rows0), parts1 = parts_of(rows1);
    if (index < parts0) return Part(blocks0, scales0, y0, rows0, y0_stride, index * ROW_TILES);
    index -= parts0;
    if (index < parts1) return Part(blocks1_or_none, scales1_or_none, y1_or_none, rows1, y1_stride, index * ROW_TILES);
    index -= parts1;
    return Part(blocks2_or_none, scales2_or_none, y2_or_none, rows2, y2_stride, index * ROW_TILES);
}

#if defined(ON_CPU)

void main() {
    const uint lane = gl_LocalInvocationID.x;
    Part part = part_of(gl_WorkGroupID.y);
    const uint last_tile = tiles_of(part.rows) - 1;
    const uint first_token = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * COLUMNS;
    if (first_token >= tokens) return;
    const uint block_count = (cols + BLOCK_COLS - 1) / BLOCK_COLS, units_per_row = (cols + BLOCK - 1) / BLOCK;
    const uint length = segment_blocks(block_count);

    float total[ROW_TILES][COLUMNS], acc[ROW_TILES][COLUMNS];
    [[dont_unroll]] for (uint first = 0; first < block_count; first += length) {
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++)
            [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[t][c] = 0.0;
        const uint end = min(first + length, block_count);
        [[dont_unroll]] for (uint b = first; b < end; b++) {
            Weights w[ROW_TILES];
            vec2 s[ROW_TILES][UNITS];
            [[unroll]] for (uint t = 0; t < ROW_TILES; t++) {
                w[t] = weights_at(part.blocks, part.scales, min(part.first_tile + t, last_tile), b, units_per_row, lane);
                unpack_units(w[t]);
#if defined(SCALED_BY_GROUP)
                [[unroll]] for (uint u = 0; u < UNITS; u++) s[t][u] = scale_of_words(w[t].scales[u], lane);
#endif
            }
            uint at = b * x_stride + first_token;
            [[dont_unroll]] for (uint digit = 0; digit < 2; digit++) {
                uint scale_bits = 0;
                [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
                    const ActivationBlock a = x.at[at + c];
                    const uvec2 scale = x_scales.at[at + c];
                    scale_bits |= scale.x;
                    [[unroll]] for (uint t = 0; t < ROW_TILES; t++)
                        acc[t][c] = folded(w[t], a, abs(uintBitsToFloat(scale.x)), scale.y, s[t], acc[t][c]);
                }
                // Where a column has no second digit, that adds nothing.
                if ((scale_bits & SECOND_DIGIT) == 0) break;
                at += block_count * x_stride;
            }
        }
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++)
            [[unroll]] for (uint c = 0; c < COLUMNS; c++)
                total[t][c] = first == 0 ? acc[t][c] : total[t][c] + acc[t][c];
    }

    [[unroll]] for (uint t = 0; t < ROW_TILES; t++) {
        const uint row = (part.first_tile + t) * TILE_ROWS + lane;
        if (row >= part.rows) return;
#if defined(SCALES_ROW)
        const float scale = half_of(part.scales, part.first_tile + t, lane);
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) total[t][c] *= scale;
#endif
        [[unroll]] for (uint c = 0; c < COLUMNS; c++)
            if (first_token + c < tokens)
                part.y.at[(first_token + c) * part.y_stride + row] = floatBitsToUint(total[t][c]);
    }
}

#else

const uint MATRICES = GEGLU + 1;
// Columns whose segments are added up at once: an invocation adds one.
const uint STAGED = SEGMENTS;

shared float partial[MATRICES][SEGMENTS][STAGED][TILE_ROWS];
// The largest magnitude of a block, and its sums, for each of two digits.
shared uint largest[2][STAGED];
shared int sums[2][STAGED][3];
shared int results[STAGED][TILE_ROWS];

void main() {
    const uint lane = gl_LocalInvocationID.x, segment = subgroupBroadcastFirst(gl_LocalInvocationID.y);
    const uint first_token = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * COLUMNS;
    if (first_token >= tokens) return;
    const uint block_count = (cols + BLOCK_COLS - 1) / BLOCK_COLS, units_per_row = (cols + BLOCK - 1) / BLOCK;

    Part part = part_of(gl_WorkGroupID.y);
    const uint tile = part.first_tile;
    Blocks blocks[MATRICES];
    Scales scales[MATRICES];
    blocks[0] = part.blocks;
    scales[0] = part.scales;
    if (GEGLU == 1) {
        blocks[MATRICES - 1] = blocks1_or_none;
        scales[MATRICES - 1] = scales1_or_none;
    }

    const uint length = segment_blocks(block_count), segments = (block_count + length - 1) / length;
    const uint first = min(segment * length, block_count), end = min(first + length, block_count);
    float acc[MATRICES][COLUMNS];
    [[unroll]] for (uint m = 0; m < MATRICES; m++)
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[m][c] = 0.0;

    // A block is asked for before the one before it is used.
    Weights next[MATRICES];
    [[unroll]] for (uint m = 0; m < MATRICES; m++)
        next[m] = weights_at(blocks[m], scales[m], tile, min(first, block_count - 1), units_per_row, lane);
    [[dont_unroll]] for (uint b = first; b < end; b++) {
        Weights w[MATRICES];
        vec2 s[MATRICES][UNITS];
        const uint ahead = min(b + 1, block_count - 1);
        [[unroll]] for (uint m = 0; m < MATRICES; m++) {
            w[m] = next[m];
            next[m] = weights_at(blocks[m], scales[m], tile, ahead, units_per_row, lane);
            unpack_units(w[m]);
#if defined(SCALED_BY_GROUP)
            [[unroll]] for (uint u = 0; u < UNITS; u++) s[m][u] = scale_of_words(w[m].scales[u], lane);
#endif
        }
        uint at = b * x_stride + first_token;
        [[dont_unroll]] for (uint digit = 0; digit < 2; digit++) {
            uint scale_bits = 0;
            [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
                const ActivationBlock a = x.at[at + c];
                const uvec2 scale = x_scales.at[at + c];
                scale_bits |= scale.x;
                [[unroll]] for (uint m = 0; m < MATRICES; m++)
                    acc[m][c] = folded(w[m], a, abs(uintBitsToFloat(scale.x)), scale.y, s[m], acc[m][c]);
            }
            // Where a column has no second digit, that adds nothing.
            if ((scale_bits & SECOND_DIGIT) == 0) break;
            at += block_count * x_stride;
        }
    }

    // An invocation adds up the segments of column `segment` of those that are staged, in order.
    const uint row = tile * TILE_ROWS + lane;
    [[unroll]] for (uint staged = 0; staged < COLUMNS; staged += STAGED) {
        if (staged > 0) barrier();
        [[unroll]] for (uint m = 0; m < MATRICES; m++)
            [[unroll]] for (uint c = 0; c < STAGED; c++)
                if (staged + c < COLUMNS) partial[m][segment][c][lane] = acc[m][staged + c];
        if (lane < 2) {
            largest[lane][segment] = 0;
            [[unroll]] for (uint i = 0; i < 3; i++) sums[lane][segment][i] = 0;
        }
        barrier();
        const uint column = segment, token = first_token + staged + column;
        const bool is_one = staged + column < COLUMNS && token < tokens;
        float total[MATRICES];
        [[unroll]] for (uint m = 0; m < MATRICES; m++) {
            total[m] = partial[m][0][column][lane];
            for (uint i = 1; i < segments; i++) total[m] += partial[m][i][column][lane];
#if defined(SCALES_ROW)
            total[m] *= half_of(scales[m], tile, lane);
#endif
        }
        if (GEGLU == 0) {
            if (is_one && row < part.rows) part.y.at[token * part.y_stride + row] = floatBitsToUint(total[0]);
        } else {
            // The rows of a tile are a block of what comes next, of as many blocks as there are tiles.
            float value = is_one && row < part.rows ? gelu_tanh(total[0]) * total[MATRICES - 1] : 0.0;
            const uint tiles = tiles_of(part.rows);
            bool has_second = false;
            [[dont_unroll]] for (uint digit = 0; digit < 2; digit++) {
                // What the invocations add up here is all zero.
                atomicMax(largest[digit][column], magnitude(value));
                barrier();
                const uint block_largest = largest[digit][column];
                const int q = quantized(value, block_largest);
                results[column][lane] = q;
                atomicAdd(sums[digit][column][lane / 16], q);
                atomicAdd(sums[digit][column][2], abs(q));
                barrier();
                if (digit == 0) has_second = needs_second(block_largest, sums[digit][column][2]);
                const uint to = (digit * tiles + tile) * x_stride + token;
                if (is_one && lane < 8 && (digit == 0 || has_second)) {
                    const ivec4 four = ivec4(results[column][4 * lane], results[column][4 * lane + 1],
                                             results[column][4 * lane + 2], results[column][4 * lane + 3]);
                    y0.at[to * 8 + lane] = packed_four(four);
                }
                const float scale = scale_of(block_largest);
                if (is_one && lane == 0) {
                    const uint word = packed_sums(sums[digit][column][0], sums[digit][column][1]);
                    const bool is_there = digit == 0 || has_second;
                    y1_or_none.at[to * 2] = is_there ? flagged(scale, digit == 0 && has_second) : 0;
                    y1_or_none.at[to * 2 + 1] = is_there ? word : 0;
                }
                value = fma(-float(q), scale, value);
                barrier();
            }
        }
    }
}

#endif
