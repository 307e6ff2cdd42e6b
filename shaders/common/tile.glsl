// Products of tiles of small integers, computed by a subgroup: [TILE_M, TILE_K] by [TILE_K, TILE_N], added to [TILE_M,
// TILE_N].
//
// With COOPERATIVE the device multiplies (VK_KHR_cooperative_matrix). Otherwise the 32 invocations of a row of the
// workgroup compute equal integers from shared memory, so that code with tiles can be tested on any device. Which
// invocation has which element of a sum is unknown, so operands of a sum are tiles of the same kind.
//
// Factors and floats are in shared arrays of uvec2 and float; `at` and `stride` count elements of these. `stride` is
// the distance of the rows of the left factor, and of the columns of the right factor.
//
//   TileA, TileB              factors, int8
//   TileSum                   sums, i32
//   TileFloat                 f32, with elements in the places of the sum's
//   LOAD_A, LOAD_B            (tile, memory, at, stride)
//   LOAD_ROWS, LOAD_COLUMNS   (tile, memory, at): a TileFloat with one value for each row, or for each column
//   CLEAR(sum)                sets to zero
//   MULTIPLY_ADD(sum, a, b)   adds a product, as above
//   FLOATS(tile, sum)         the sum as f32
//   EACH(e), tile[e]          loops over the elements of an invocation; one of them
//   STORE(tile, memory, at)   stores column by column
//   WAVE, WAVE_LANE, WAVE_LANES   number of the subgroup, number of the invocation in it, size of the subgroup
#if defined(COOPERATIVE)
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require

#define WAVE gl_SubgroupID
#define WAVE_LANE gl_SubgroupInvocationID
#define WAVE_LANES gl_SubgroupSize
#define TileA coopmat<int8_t, gl_ScopeSubgroup, TILE_M, TILE_K, gl_MatrixUseA>
#define TileB coopmat<int8_t, gl_ScopeSubgroup, TILE_K, TILE_N, gl_MatrixUseB>
#define TileSum coopmat<int, gl_ScopeSubgroup, TILE_M, TILE_N, gl_MatrixUseAccumulator>
#define TileFloat coopmat<float, gl_ScopeSubgroup, TILE_M, TILE_N, gl_MatrixUseAccumulator>
#define EACH(e) [[unroll]] for (uint e = 0; e < TileFloat(0).length(); e++)
#define LOAD_A(tile, memory, at, stride) coopMatLoad(tile, memory, at, stride, gl_CooperativeMatrixLayoutRowMajor)
#define LOAD_B(tile, memory, at, stride) coopMatLoad(tile, memory, at, stride, gl_CooperativeMatrixLayoutColumnMajor)
// A stride of 0 repeats one column, or one row.
#define LOAD_ROWS(tile, memory, at) coopMatLoad(tile, memory, at, 0, gl_CooperativeMatrixLayoutColumnMajor)
#define LOAD_COLUMNS(tile, memory, at) coopMatLoad(tile, memory, at, 0, gl_CooperativeMatrixLayoutRowMajor)
#define STORE(tile, memory, at) coopMatStore(tile, memory, at, TILE_M, gl_CooperativeMatrixLayoutColumnMajor)

#define CLEAR(sum) sum = TileSum(0)
#define MULTIPLY_ADD(sum, a, b) sum = coopMatMulAdd(a, b, sum)
#define FLOATS(tile, sum) tile = TileFloat(sum)

#else

const uint WAVE_LANES = 32;
#define WAVE gl_LocalInvocationID.y
#define WAVE_LANE gl_LocalInvocationID.x
const uint ELEMENTS = TILE_M * TILE_N / WAVE_LANES;
// Unrolling takes long in compilers for CPUs, and only tests run this.
#define EACH(e) [[dont_unroll]] for (uint e = 0; e < ELEMENTS; e++)
const uint TILE_WORDS = TILE_K / 8;
// For each element of an invocation, the words of its row or column.
#define TileA uvec2[ELEMENTS][TILE_WORDS]
#define TileB uvec2[ELEMENTS][TILE_WORDS]
#define TileSum int[ELEMENTS]
#define TileFloat float[ELEMENTS]

// Row and column of an element of an invocation; elements are stored column by column.
uint tile_row(uint element) { return (element * WAVE_LANES + WAVE_LANE) % TILE_M; }
uint tile_column(uint element) { return (element * WAVE_LANES + WAVE_LANE) / TILE_M; }

#define LOAD_FACTOR(tile, memory, from) \
    EACH(e) [[unroll]] for (uint w = 0; w < TILE_WORDS; w++) tile[e][w] = memory[(from) + w]
#define LOAD_A(tile, memory, at, stride) LOAD_FACTOR(tile, memory, (at) + tile_row(e) * (stride))
#define LOAD_B(tile, memory, at, stride) LOAD_FACTOR(tile, memory, (at) + tile_column(e) * (stride))
#define LOAD_ROWS(tile, memory, at) EACH(e) tile[e] = memory[(at) + tile_row(e)]
#define LOAD_COLUMNS(tile, memory, at) EACH(e) tile[e] = memory[(at) + tile_column(e)]
#define STORE(tile, memory, at) EACH(e) memory[(at) + e * WAVE_LANES + WAVE_LANE] = tile[e]

#define CLEAR(sum) EACH(e) sum[e] = 0
#define MULTIPLY_ADD(sum, a, b)                                  \
    EACH(e) [[unroll]] for (uint w = 0; w < TILE_WORDS; w++)     \
        [[unroll]] for (uint i = 0; i < 2; i++) sum[e] += dotPacked4x8EXT(int(a[e][w][i]), int(b[e][w][i]))
#define FLOATS(tile, sum) EACH(e) tile[e] = float(sum[e])
#endif
