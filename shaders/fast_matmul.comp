// y[t, r] = sum over k of x[t, k] * W[r, k], with quantized x. common/fast.glsl specifies the result, including the
// order of sums.
//
//   W  up to three matrices [rows, cols], packed (common/weights.glsl), all multiplied with the same x
//   x  int8 blocks of `tokens` rows, padded to x_stride       y  f32 [tokens, rows] of each matrix, rows y_stride apart
//
// GATED needs two matrices of the same shape, gate and up. y0 and y1_or_none are then the blocks and scales of
// activated(gate) * up, quantized, with y0_stride padded rows. SILU chooses the activation (common/activation.glsl).
//
// More tokens than COLUMNS need several passes over the weights: the x dimension of the grid counts passes that run
// together, the z dimension counts groups of such passes. Workgroups with the same weights are neighbours in the grid,
// so that the weights are read from memory once. Unused columns read the padding of x, and are not stored.
//
// GROUPED computes products of experts: each token of a mixture has experts, and group_pairs.comp groups the pairs of a
// token and an expert by expert. `tokens` is then the number of pairs, y has a row for each pair, and a matrix holds the
// matrices of all experts, one after the other, of `rows` rows each, a multiple of 32. The x dimension of the grid counts
// items, which say which expert's pairs a workgroup computes. The row of x for a pair is its own (IN_ORDER), or the one
// that a list has (GATHERED). There are two matrices at most, and the arguments of a third one are the items and the list.
//
// Three implementations compute the same bits:
//
//   common/fast_by_lanes.glsl   each lane computes a row: for a GPU and few tokens
//   common/fast_in_tiles.glsl   IN_TILES: subgroups multiply tiles, for a GPU and many tokens
//   common/fast_on_cpu.glsl     ON_CPU: for a CPU device
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "memory.glsl"
#include "weights.glsl"
#include "fast.glsl"

// Number of tokens that a workgroup computes.
layout(constant_id = 0) const uint COLUMNS = 1;
#if defined(ON_CPU)
#define IN_F32
#define WORKGROUP 32
#include "lanes.glsl"
#include "loads_on_cpu.glsl"
layout(local_size_x = INVOCATIONS) in;
const uint ROW_TILES = 1;
// Invocations load single words (common/loads_on_cpu.glsl).
#define ActivationBlocks ReadUints
#define ActivationScales ReadUints
#elif defined(IN_TILES)
layout(local_size_x = 32, local_size_y = 8) in;
layout(constant_id = 1) const uint HALVES = 1;
const uint ROW_TILES = 4;
#else
layout(local_size_x = 32, local_size_y = SEGMENTS) in;
layout(constant_id = 1) const uint GATED = 0;
layout(constant_id = 4) const uint SILU = 0;
#include "activation.glsl"
const uint ROW_TILES = 1;
#endif
// Number of blocks of weights that share one scale (common/weights.glsl).
layout(constant_id = 2) const uint SCALE_BLOCKS = 1;
layout(constant_id = 9) const uint GROUPED = 0;
const uint IN_ORDER = 1, GATHERED = 2;
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

// The columns of a workgroup, from `first` to before `end`, and the expert whose matrix they are multiplied with.
struct Columns {
    uint first;
    uint end;
    uint expert;
};

Columns own_columns() {
    if (GROUPED != 0) {
        const uvec4 item = ReadUvec4s(uvec2(blocks2_or_none)).at[gl_WorkGroupID.x];
        return Columns(item.y, item.y + item.z, item.x);
    }
    return Columns((gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * COLUMNS, tokens, 0);
}

// The row of x of a column. Unused columns repeat the last row of a list.
uint x_row(uint column) {
    return GROUPED == GATHERED ? ReadUints(uvec2(scales2_or_none)).at[min(column, tokens - 1)] : column;
}

// A part of a matrix: ROW_TILES tiles of rows, of which `first_row` is the first. Tiles are counted through the matrices
// of all experts; `tiles_end` is the end of the expert's own. y_stride is the distance between the tokens of its product.
// It holds addresses as uvec2, because SwiftShader's compiler crashes if code selects between buffer references.
struct Part {
    uint matrix;
    uvec2 blocks;
    uvec2 scales;
    uint rows;
    uint y_stride;
    uint first_row;
    uint first_tile;
    uint tiles_end;
};

Part part_in(uint matrix, uvec2 blocks, uvec2 scales, uint rows, uint y_stride, uint index, uint expert) {
    const uint first = index * ROW_TILES, all = tiles_of(rows) * expert;
    return Part(matrix, blocks, scales, rows, y_stride, first * TILE_ROWS, all + first, all + tiles_of(rows));
}

// Parts are numbered through all matrices. The two matrices of GATED share their parts.
Part part_of(uint index, uint expert) {
#if !defined(ON_CPU) && !defined(IN_TILES)
    if (GATED == 1) return part_in(0, uvec2(blocks0), uvec2(scales0), rows0, y0_stride, index, expert);
#endif
    const uint parts0 = parts_of(rows0), parts1 = parts_of(rows1);
    if (index < parts0) return part_in(0, uvec2(blocks0), uvec2(scales0), rows0, y0_stride, index, expert);
    index -= parts0;
    if (index < parts1) return part_in(1, uvec2(blocks1_or_none), uvec2(scales1_or_none), rows1, y1_stride, index, expert);
    index -= parts1;
    return part_in(2, uvec2(blocks2_or_none), uvec2(scales2_or_none), rows2, y2_stride, index, expert);
}

void put(Part part, uint token, uint row, float value) {
    const uint at = token * part.y_stride + row, bits = floatBitsToUint(value);
    if (part.matrix == 0) y0.at[at] = bits;
    else if (part.matrix == 1) y1_or_none.at[at] = bits;
    else y2_or_none.at[at] = bits;
}

#if defined(ON_CPU)
#include "fast_on_cpu.glsl"
#elif defined(IN_TILES)
#include "fast_in_tiles.glsl"
#else
#include "fast_by_lanes.glsl"
#endif
