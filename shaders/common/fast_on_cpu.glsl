// An implementation of fast_matmul.comp for a CPU device, without GATED. A CPU has no scalar registers and no dot
// products of packed bytes, and barriers between invocations are slow. So a workgroup is one SIMD vector of the CPU. It
// computes a tile of rows, with several rows per invocation. So it reads the tile's weights in memory order, which a
// CPU prefetches, and uses each unpacked activation for several rows.

// Number of rows of an invocation.
const uint ROWS = TURNS;

// Block `at` of the activations. Each invocation unpacks the words that it loads.
Activations activations_at(uint at) {
    const uint own = 8 * at + own_of_four();
    Activations a;
    all_four(unpacked(x.at[own]), a.low);
    all_four(unpacked(x.at[own + 4]), a.high);
    return a;
}

uvec2 activation_scale_at(uint at) { return both(x_scales.at[2 * at + own_of_four() % 2]); }

void main() {
    const Columns columns = own_columns();
    const uint first_token = columns.first, end_token = columns.end;
    if (first_token >= end_token) return;
    Part part = part_of(gl_WorkGroupID.y, columns.expert);
    uint rows_of_x[COLUMNS];
    [[unroll]] for (uint c = 0; c < COLUMNS; c++) rows_of_x[c] = x_row(first_token + c);
    const uint block_count = (cols + BLOCK_COLS - 1) / BLOCK_COLS, units_per_row = (cols + BLOCK - 1) / BLOCK;
    const uint length = segment_blocks(block_count);

    float total[ROWS][COLUMNS], acc[ROWS][COLUMNS];
    [[dont_unroll]] for (uint first = 0; first < block_count; first += length) {
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[r][c] = 0.0;
        const uint end = min(first + length, block_count);
        [[dont_unroll]] for (uint b = first; b < end; b++) {
            Weights w[ROWS];
            vec2 s[ROWS][UNITS];
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                w[r] = weights_at(Blocks(part.blocks), Scales(part.scales), part.first_tile, b, units_per_row, lane_of(r));
                unpack_units(w[r]);
#if defined(SCALED_BY_GROUP)
                [[unroll]] for (uint u = 0; u < UNITS; u++) s[r][u] = scale_of_words(w[r].scales[u], lane_of(r));
#endif
            }
            uint at = b * x_stride;
            [[dont_unroll]] for (uint digit = 0; digit < 2; digit++) {
                uint scale_bits = 0;
                [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
                    const Activations a = activations_at(at + rows_of_x[c]);
                    const uvec2 scale = activation_scale_at(at + rows_of_x[c]);
                    scale_bits |= scale.x;
                    [[unroll]] for (uint r = 0; r < ROWS; r++)
                        acc[r][c] = folded(w[r], a, abs(uintBitsToFloat(scale.x)), scale.y, s[r], acc[r][c]);
                }
                // For a column without second digits, the second pass adds nothing.
                if ((scale_bits & SECOND_DIGIT) == 0) break;
                at += block_count * x_stride;
            }
        }
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint c = 0; c < COLUMNS; c++)
                total[r][c] = first == 0 ? acc[r][c] : total[r][c] + acc[r][c];
    }

    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        const uint row = part.first_row + lane_of(r);
        if (row >= part.rows) return;
#if defined(SCALES_ROW)
        const float scale = half_of(Scales(part.scales), part.first_tile, lane_of(r));
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) total[r][c] *= scale;
#endif
        [[unroll]] for (uint c = 0; c < COLUMNS; c++)
            if (first_token + c < end_token) put(part, first_token + c, row, total[r][c]);
    }
}
