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
// Weights are read once for COLUMNS tokens. Of more, a few times COLUMNS go together, which is how many workgroups there are
// in a row, z counting such groups: those that need the same weights stand side by side, so that memory gives them once.
// Spare columns read what pads x, and are not stored.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_ballot : require
#extension GL_EXT_integer_dot_product : require
#include "memory.glsl"
#include "weights.glsl"
#include "fast.glsl"
#include "gelu.glsl"

layout(local_size_x = 32, local_size_y = SEGMENTS) in;
layout(constant_id = 0) const uint COLUMNS = 1;
layout(constant_id = 1) const uint GEGLU = 0;
// Blocks of weights that share one scale (common/weights.glsl).
layout(constant_id = 2) const uint SCALE_BLOCKS = 1;
const uint MATRICES = GEGLU + 1;
// Columns whose segments are added up at once: an invocation adds one.
const uint STAGED = SEGMENTS;
// Blocks of weights that meet a block of activations.
const uint UNITS = BLOCK_COLS / BLOCK;

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

shared float partial[MATRICES][SEGMENTS][STAGED][TILE_ROWS];
// Of each digit.
shared uint largest[2][STAGED];
shared int sums[2][STAGED][3];
shared int results[STAGED][TILE_ROWS];

// The weights of a row that meet a block of activations, as they are stored, and the words of their scales. The last may
// have no second unit.
struct Weights {
    uvec4 units[UNITS];
#if defined(HIGH_BITS)
    HIGH_BITS high;
#endif
    uvec2 scales[UNITS];
};

Weights weights_at(Blocks blocks, Scales scales, uint tile, uint block, uint units_per_row, uint lane) {
    Weights w;
#if defined(HIGH_BITS)
    const uint row = tile * ((units_per_row + 1) / UNITS) + block;
    w.units[0] = blocks.at[row].lanes[lane];
    w.high = blocks.at[row].high[lane];
#endif
    [[unroll]] for (uint u = 0; u < UNITS; u++) {
        const uint unit = block * UNITS + u;
        const bool is_one = UNITS == 1 || unit < units_per_row;
#if !defined(HIGH_BITS)
        w.units[u] = is_one ? block_at(blocks, tile, unit, lane, units_per_row) : uvec4(0);
#endif
        w.scales[u] = uvec2(0);
#if defined(SCALED_BY_GROUP)
        if (u == 0 || SCALE_BLOCKS % UNITS != 0 && is_one)
            w.scales[u] = scale_words(scales, tile, unit, lane, units_per_row, SCALE_BLOCKS);
#endif
    }
    return w;
}

// Makes two units of bytes of what holds both.
void unpack_units(inout Weights w) {
#if defined(HIGH_BITS)
    const uvec4 low = w.units[0];
    w.units[0] = bytes_of(low, w.high, 0);
    w.units[1] = bytes_of(low, w.high, 1);
#endif
}

// The dot product of unit `u` of weights and its part of a block, from `d`.
int dot_unit(uvec4 w, ActivationBlock a, uint u, int d) {
#if defined(WEIGHT_INT4)
    [[unroll]] for (uint j = 0; j < 4; j++) {
        d += dotPacked4x8EXT(int(w[j] & 0x0f0f0f0fu), int(a.low[j]));
        d += dotPacked4x8EXT(int(w[j] >> 4 & 0x0f0f0f0fu), int(a.high[j]));
    }
#else
    const uvec4 part = u == 0 ? a.low : a.high;
    [[unroll]] for (uint j = 0; j < 4; j++) d += dotPacked4x8EXT(int(w[j]), int(part[j]));
#endif
    return d;
}

// What a block adds to a sum.
float folded(Weights w, ActivationBlock a, float scale, uint a_sums, vec2 s[UNITS], float acc) {
    // The sums of both units: what is stored is too large by BIAS in each column.
    const int low = low_sum(a_sums), high = high_sum(a_sums);
#if defined(WEIGHT_INT4)
    acc = fma(float(dot_unit(w.units[0], a, 0, -BIAS * (low + high))), s[0].x * scale, acc);
#if defined(SHIFTED)
    acc = fma(float(low + high), s[0].y * scale, acc);
#endif
#elif defined(SCALES_ROW)
    acc = fma(float(dot_unit(w.units[1], a, 1, dot_unit(w.units[0], a, 0, 0))), scale, acc);
#else
    if (SCALE_BLOCKS % UNITS == 0) {
        const int d = dot_unit(w.units[0], a, 0, -BIAS * (low + high));
        acc = fma(float(dot_unit(w.units[1], a, 1, d)), s[0].x * scale, acc);
#if defined(SHIFTED)
        acc = fma(float(low + high), s[0].y * scale, acc);
#endif
    } else {
        acc = fma(float(dot_unit(w.units[0], a, 0, -BIAS * low)), s[0].x * scale, acc);
#if defined(SHIFTED)
        acc = fma(float(low), s[0].y * scale, acc);
#endif
        acc = fma(float(dot_unit(w.units[1], a, 1, -BIAS * high)), s[1].x * scale, acc);
#if defined(SHIFTED)
        acc = fma(float(high), s[1].y * scale, acc);
#endif
    }
#endif
    return acc;
}

void main() {
    const uint lane = gl_LocalInvocationID.x, segment = subgroupBroadcastFirst(gl_LocalInvocationID.y);
    uint tile = gl_WorkGroupID.y;
    const uint first_token = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * COLUMNS;
    if (first_token >= tokens) return;
    const uint block_count = (cols + BLOCK_COLS - 1) / BLOCK_COLS, units_per_row = (cols + BLOCK - 1) / BLOCK;

    // The matrix that this workgroup is of.
    Blocks blocks[MATRICES];
    Scales scales[MATRICES];
    blocks[0] = blocks0;
    scales[0] = scales0;
    WriteWords y = y0;
    uint rows = rows0, y_stride = y0_stride;
    if (GEGLU == 1) {
        blocks[MATRICES - 1] = blocks1_or_none;
        scales[MATRICES - 1] = scales1_or_none;
    } else {
        const uint tiles0 = (rows0 + TILE_ROWS - 1) / TILE_ROWS, tiles1 = (rows1 + TILE_ROWS - 1) / TILE_ROWS;
        if (tile >= tiles0 + tiles1) {
            tile -= tiles0 + tiles1;
            blocks[0] = blocks2_or_none;
            scales[0] = scales2_or_none;
            y = y2_or_none;
            rows = rows2;
            y_stride = y2_stride;
        } else if (tile >= tiles0) {
            tile -= tiles0;
            blocks[0] = blocks1_or_none;
            scales[0] = scales1_or_none;
            y = y1_or_none;
            rows = rows1;
            y_stride = y1_stride;
        }
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
            if (is_one && row < rows) y.at[token * y_stride + row] = floatBitsToUint(total[0]);
        } else {
            // The rows of a tile are a block of what comes next, of as many blocks as there are tiles.
            float value = is_one && row < rows ? gelu_tanh(total[0]) * total[MATRICES - 1] : 0.0;
            const uint tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
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
