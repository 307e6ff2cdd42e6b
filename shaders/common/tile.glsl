// Products of tiles, computed by a subgroup: [TILE_M, TILE_K] by [TILE_K, TILE_N], added to [TILE_M, TILE_N]. Factors
// are int8 and sums i32; with FACTORS_F16, factors are f16 and sums f32.
//
// With COOPERATIVE, the code uses cooperative matrices (VK_KHR_cooperative_matrix). Otherwise 32 invocations with the
// same gl_LocalInvocationID.y compute the products from shared memory, so that the code can be tested on any
// device. The mapping of elements to invocations is unknown, so elementwise operations use tiles of the same kind.
//
// Factors are in shared arrays of uvec2, floats in shared arrays of float; `at` and `stride` count their elements.
// `stride` is the distance between rows of the left factor, or between columns of the right factor.
//
//   TileA, TileB              factors
//   TileSum                   sums
//   TileFloat                 f32, with the same mapping of elements to invocations as TileSum
//   LOAD_A, LOAD_B            (tile, memory, at, stride)
//   LOAD_ROWS, LOAD_COLUMNS   (tile, memory, at): a TileFloat with one value for each row, or for each column
//   CLEAR(sum)                sets to zero
//   MULTIPLY_ADD(sum, a, b)   adds the product of a and b
//   FLOATS(tile, sum)         converts the sum to f32
//   EACH(e), tile[e]          loops over the elements of an invocation; accesses one of them
//   STORE(tile, memory, at)   stores the bits of a TileFloat column by column in an array of uvec2
//   STORE_ROWS(tile, memory, at, stride)   stores them row by row
//   WAVE, WAVE_LANE, WAVE_LANES   index of the subgroup, index of the invocation in it, size of the subgroup
#if defined(COOPERATIVE)
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require

#if defined(FACTORS_F16)
#define FACTOR float16_t
#define SUM float
#else
#define FACTOR int8_t
#define SUM int
#endif
#define WAVE gl_SubgroupID
#define WAVE_LANE gl_SubgroupInvocationID
#define WAVE_LANES gl_SubgroupSize
#define TileA coopmat<FACTOR, gl_ScopeSubgroup, TILE_M, TILE_K, gl_MatrixUseA>
#define TileB coopmat<FACTOR, gl_ScopeSubgroup, TILE_K, TILE_N, gl_MatrixUseB>
#define TileSum coopmat<SUM, gl_ScopeSubgroup, TILE_M, TILE_N, gl_MatrixUseAccumulator>
#define TileFloat coopmat<float, gl_ScopeSubgroup, TILE_M, TILE_N, gl_MatrixUseAccumulator>
#define EACH(e) [[unroll]] for (uint e = 0; e < TileFloat(0).length(); e++)
#define LOAD_A(tile, memory, at, stride) coopMatLoad(tile, memory, at, stride, gl_CooperativeMatrixLayoutRowMajor)
#define LOAD_B(tile, memory, at, stride) coopMatLoad(tile, memory, at, stride, gl_CooperativeMatrixLayoutColumnMajor)
// A stride of 0 repeats one column, or one row.
#define LOAD_ROWS(tile, memory, at) coopMatLoad(tile, memory, at, 0, gl_CooperativeMatrixLayoutColumnMajor)
#define LOAD_COLUMNS(tile, memory, at) coopMatLoad(tile, memory, at, 0, gl_CooperativeMatrixLayoutRowMajor)
#define STORE(tile, memory, at) coopMatStore(tile, memory, at, TILE_M / 2, gl_CooperativeMatrixLayoutColumnMajor)
#define STORE_ROWS(tile, memory, at, stride) coopMatStore(tile, memory, at, stride, gl_CooperativeMatrixLayoutRowMajor)

#define CLEAR(sum) sum = TileSum(0)
#define MULTIPLY_ADD(sum, a, b) sum = coopMatMulAdd(a, b, sum)
#define FLOATS(tile, sum) tile = TileFloat(sum)

#else

const uint WAVE_LANES = 32;
#define WAVE gl_LocalInvocationID.y
#define WAVE_LANE gl_LocalInvocationID.x
const uint ELEMENTS = TILE_M * TILE_N / WAVE_LANES;
// Not unrolled, because compilers for CPUs would take long. Only tests run this code.
#define EACH(e) [[dont_unroll]] for (uint e = 0; e < ELEMENTS; e++)
#if defined(FACTORS_F16)
const uint TILE_WORDS = TILE_K / 4;
#define SUM float
void multiply_add(inout float sum, uvec2 a, uvec2 b) {
    [[unroll]] for (uint i = 0; i < 2; i++) {
        const vec2 x = unpackHalf2x16(a[i]), y = unpackHalf2x16(b[i]);
        sum = fma(x.y, y.y, fma(x.x, y.x, sum));
    }
}
#else
const uint TILE_WORDS = TILE_K / 8;
#define SUM int
void multiply_add(inout int sum, uvec2 a, uvec2 b) {
    [[unroll]] for (uint i = 0; i < 2; i++) sum += dotPacked4x8EXT(int(a[i]), int(b[i]));
}
#endif
// For each element of an invocation, the words of its row of A or its column of B.
#define TileA uvec2[ELEMENTS][TILE_WORDS]
#define TileB uvec2[ELEMENTS][TILE_WORDS]
#define TileSum SUM[ELEMENTS]
#define TileFloat float[ELEMENTS]

// Row and column of an invocation's element. Elements are stored column by column.
uint tile_row(uint element) { return (element * WAVE_LANES + WAVE_LANE) % TILE_M; }
uint tile_column(uint element) { return (element * WAVE_LANES + WAVE_LANE) / TILE_M; }

#define LOAD_FACTOR(tile, memory, from) \
    EACH(e) [[unroll]] for (uint w = 0; w < TILE_WORDS; w++) tile[e][w] = memory[(from) + w]
#define LOAD_A(tile, memory, at, stride) LOAD_FACTOR(tile, memory, (at) + tile_row(e) * (stride))
#define LOAD_B(tile, memory, at, stride) LOAD_FACTOR(tile, memory, (at) + tile_column(e) * (stride))
#define LOAD_ROWS(tile, memory, at) EACH(e) tile[e] = memory[(at) + tile_row(e)]
#define LOAD_COLUMNS(tile, memory, at) EACH(e) tile[e] = memory[(at) + tile_column(e)]
#define STORE(tile, memory, at)                                     \
    EACH(e) {                                                       \
        const uint element = e * WAVE_LANES + WAVE_LANE;            \
        memory[(at) + element / 2][element % 2] = floatBitsToUint(tile[e]); \
    }

#define STORE_ROWS(tile, memory, at, stride)                                                  \
    EACH(e)                                                                                   \
        memory[(at) + tile_row(e) * (stride) + tile_column(e) / 2][tile_column(e) % 2] =      \
            floatBitsToUint(tile[e])

#define CLEAR(sum) EACH(e) sum[e] = SUM(0)
#define MULTIPLY_ADD(sum, a, b)                                  \
    EACH(e) [[unroll]] for (uint w = 0; w < TILE_WORDS; w++) multiply_add(sum[e], a[e][w], b[e][w])
#define FLOATS(tile, sum) EACH(e) tile[e] = float(sum[e])
#endif
