// An implementation of fast_matmul.comp in which each lane computes a row. A workgroup computes 32 rows by COLUMNS
// tokens, and reads the weights once for all of these tokens. Each of its subgroups (or groups of several small
// subgroups) processes one segment of the columns. So all lanes of a subgroup use the same activations, which can come
// from scalar registers, or from shared memory with SHARED_ACTIVATIONS.

#include "invocation.glsl"

layout(constant_id = 3) const uint SHARED_ACTIVATIONS = 0;
// Number of activation blocks in shared memory: COLUMNS for each segment, plus one, because an array cannot be empty.
const uint SHARED_BLOCKS = SHARED_ACTIVATIONS * SEGMENTS * COLUMNS + 1;
shared uvec4 shared_low[SHARED_BLOCKS], shared_high[SHARED_BLOCKS];
shared uvec2 shared_scales[SHARED_BLOCKS];

// Waits for the invocations of a segment, or for all invocations if a segment is not exactly one subgroup.
void await_segment() {
    if (gl_NumSubgroups == gl_WorkGroupSize.y) subgroupBarrier();
    else barrier();
}

const uint MATRICES = GATED + 1;
// Number of columns whose segments are added up in one pass. Each invocation adds up one column.
const uint STAGED = SEGMENTS;

shared float partial[MATRICES][SEGMENTS][STAGED][TILE_ROWS];
// For each of the two digits, the largest magnitude of a block, and its sums.
shared uint largest[2][STAGED];
shared int sums[2][STAGED][3];
shared int results[STAGED][TILE_ROWS];

// The activations of neighbouring tokens for one block of columns, and their scales. Kernels index them by constants, so
// that these are offsets of the load instructions: a sum of 32 bits within an index may wrap, and needs instructions of
// its own. A structure has the most tokens of any workgroup, of which only COLUMNS are read.
const uint MOST_COLUMNS = 32;
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer TokenBlocks { ActivationBlock of[MOST_COLUMNS]; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer TokenScales { uvec2 of[MOST_COLUMNS]; };

void main() {
    const uint lane = own_invocation() % TILE_ROWS, segment = own_group(TILE_ROWS);
    const Columns columns = own_columns();
    const uint first_token = columns.first, end_token = columns.end;
    if (first_token >= end_token) return;
    const uint block_count = (cols + BLOCK_COLS - 1) / BLOCK_COLS, units_per_row = (cols + BLOCK - 1) / BLOCK;

    Part part = part_of(gl_WorkGroupID.y, columns.expert);
    const uint tile = part.first_tile;
    // Without a list, the rows of x follow each other.
    uint listed[COLUMNS];
    [[unroll]] for (uint c = 0; c < COLUMNS; c++) listed[c] = x_row(first_token + c);
    const uint first_x = GROUPED == GATHERED ? 0 : first_token;
    // Addresses of the matrices, as in a Part.
    uvec2 blocks[MATRICES], scales[MATRICES];
    blocks[0] = part.blocks;
    scales[0] = part.scales;
    if (GATED == 1) {
        blocks[MATRICES - 1] = uvec2(blocks1_or_none);
        scales[MATRICES - 1] = uvec2(scales1_or_none);
    }

    const uint length = segment_blocks(block_count), segments = (block_count + length - 1) / length;
    const uint first = min(segment * length, block_count), end = min(first + length, block_count);
    float acc[MATRICES][COLUMNS];
    [[unroll]] for (uint m = 0; m < MATRICES; m++)
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[m][c] = 0.0;

    // Each block is loaded before the previous one is used.
    Weights next[MATRICES];
    [[unroll]] for (uint m = 0; m < MATRICES; m++)
        next[m] = weights_at(Blocks(blocks[m]), Scales(scales[m]), tile, min(first, block_count - 1), units_per_row, lane);
    ActivationBlock next_block;
    uvec2 next_scale;
    if (SHARED_ACTIVATIONS == 1 && lane < COLUMNS) {
        const uint at = min(first, block_count - 1) * x_stride + x_row(first_token + lane);
        next_block = x.at[at];
        next_scale = x_scales.at[at];
    }
    // Push constants that the loop needs are read once.
    const uvec2 x_address = uvec2(x), scales_address = uvec2(x_scales);
    const uint stride = x_stride;
    // All segments run the same number of iterations; a shorter segment does nothing in its last ones. Barriers require
    // that: SwiftShader waits at a barrier even in a branch that no invocation takes.
    const uint last = first + length;
    [[dont_unroll]] for (uint b = first; b < last; b++) {
        Weights w[MATRICES];
        vec2 s[MATRICES][UNITS];
        const uint ahead = min(b + 1, block_count - 1);
        [[unroll]] for (uint m = 0; m < MATRICES; m++) {
            w[m] = next[m];
            next[m] = weights_at(Blocks(blocks[m]), Scales(scales[m]), tile, ahead, units_per_row, lane);
            unpack_units(w[m]);
#if defined(SCALED_BY_GROUP)
            [[unroll]] for (uint u = 0; u < UNITS; u++) s[m][u] = scale_of_words(w[m].scales[u], lane);
#endif
        }
        const uint shared_at = SHARED_ACTIVATIONS * segment * COLUMNS;
        if (SHARED_ACTIVATIONS == 1) {
            if (lane < COLUMNS) {
                shared_low[shared_at + lane] = next_block.low;
                shared_high[shared_at + lane] = next_block.high;
                shared_scales[shared_at + lane] = next_scale;
                next_block = x.at[ahead * stride + x_row(first_token + lane)];
                next_scale = x_scales.at[ahead * stride + x_row(first_token + lane)];
            }
            await_segment();
        }
        uint at = b * stride + first_x, scale_bits = 0;
        if (SHARED_ACTIVATIONS == 1) {
            if (b < end) [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
                const ActivationBlock a = ActivationBlock(shared_low[shared_at + c], shared_high[shared_at + c]);
                const uvec2 scale = shared_scales[shared_at + c];
                scale_bits |= scale.x;
                [[unroll]] for (uint m = 0; m < MATRICES; m++)
                    acc[m][c] = folded(w[m], a, abs(uintBitsToFloat(scale.x)), scale.y, s[m], acc[m][c]);
            }
            at += block_count * stride;
        }
        // This loop processes both digits; with SHARED_ACTIVATIONS, only the second.
        [[dont_unroll]] for (uint digit = SHARED_ACTIVATIONS; digit < 2 && b < end; digit++) {
            if (SHARED_ACTIVATIONS == 1 && (scale_bits & SECOND_DIGIT) == 0) break;
            scale_bits = 0;
            if (GROUPED == GATHERED) {
                [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
                    const ActivationBlock a = x.at[at + listed[c]];
                    const uvec2 scale = x_scales.at[at + listed[c]];
                    scale_bits |= scale.x;
                    [[unroll]] for (uint m = 0; m < MATRICES; m++)
                        acc[m][c] = folded(w[m], a, abs(uintBitsToFloat(scale.x)), scale.y, s[m], acc[m][c]);
                }
            } else {
                TokenBlocks blocks_at = TokenBlocks(address_after(x_address, at * 32));
                TokenScales scales_at = TokenScales(address_after(scales_address, at * 8));
                [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
                    const ActivationBlock a = blocks_at.of[c];
                    const uvec2 scale = scales_at.of[c];
                    scale_bits |= scale.x;
                    [[unroll]] for (uint m = 0; m < MATRICES; m++)
                        acc[m][c] = folded(w[m], a, abs(uintBitsToFloat(scale.x)), scale.y, s[m], acc[m][c]);
                }
            }
            // For a column without second digits, the second pass adds nothing.
            if ((scale_bits & SECOND_DIGIT) == 0) break;
            at += block_count * stride;
        }
        if (SHARED_ACTIVATIONS == 1) await_segment();
    }

    // An invocation adds up, in order, the segments of column `segment` of the staged columns.
    // Without experts, the row follows from the tile, and needs no register of its own until here.
    const uint first_row = GROUPED == 0 ? tile * TILE_ROWS : part.first_row, row = first_row + lane;
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
        const bool is_one = staged + column < COLUMNS && token < end_token;
        float total[MATRICES];
        [[unroll]] for (uint m = 0; m < MATRICES; m++) {
            total[m] = partial[m][0][column][lane];
            for (uint i = 1; i < segments; i++) total[m] += partial[m][i][column][lane];
#if defined(SCALES_ROW)
            total[m] *= half_of(Scales(scales[m]), tile, lane);
#endif
        }
        if (GATED == 0) {
            if (is_one && row < part.rows) put(part, token, row, total[0]);
        } else {
            // The 32 rows of a tile are one block of the output activations, so there are as many blocks as tiles.
            float value = is_one && row < part.rows ? activated(total[0]) * total[MATRICES - 1] : 0.0;
            const uint tiles = tiles_of(part.rows);
            bool has_second = false;
            [[dont_unroll]] for (uint digit = 0; digit < 2; digit++) {
                // The shared counters were set to 0 above.
                atomicMax(largest[digit][column], magnitude(value));
                barrier();
                const uint block_largest = largest[digit][column];
                const int q = quantized(value, block_largest);
                results[column][lane] = q;
                atomicAdd(sums[digit][column][lane / 16], q);
                atomicAdd(sums[digit][column][2], abs(q));
                barrier();
                if (digit == 0) has_second = needs_second(block_largest, sums[digit][column][2]);
                const uint to = (digit * tiles + first_row / TILE_ROWS) * y0_stride + token;
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
