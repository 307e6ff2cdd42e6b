// A product with int8 on a device that is a CPU, which has no scalar registers, no dot products of packed bytes, and little use
// for invocations that wait for each other. A workgroup computes ROW_TILES x 32 rows, one segment after another, and several
// tiles use what was unpacked of an activation. There is no GEGLU. A body of fast_matmul.comp.

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
