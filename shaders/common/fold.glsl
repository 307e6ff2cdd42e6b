// Multiplies a block of weights with a block of activations, according to fast.glsl. All implementations of
// fast_matmul.comp share it. Include after weights.glsl and fast.glsl. SCALE_BLOCKS is the number of weight blocks that
// share a scale.
//
// Define IN_F32 for a device without dot products of packed bytes. The sums are also exact in f32, because the integers
// are small and there are few of them.

// Number of weight blocks ("units") for one block of activations.
const uint UNITS = BLOCK_COLS / BLOCK;

// The stored weights of a row for one block of activations, and the words of their scales. In the last block of a row,
// the second unit may be missing.
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

// Unpacks two units from their low and high bits, to a byte for each weight.
void unpack_units(inout Weights w) {
#if defined(HIGH_BITS)
    const uvec4 low = w.units[0];
    w.units[0] = bytes_of(low, w.high, 0);
    w.units[1] = bytes_of(low, w.high, 1);
#endif
}

// Adds four products of integers to `sum`.
#if defined(IN_F32)
#define SUM float
// A block of activations as numbers.
struct Activations {
    vec4 low[4];
    vec4 high[4];
};
vec4 unpacked(uint word) {
    const int q = int(word);
    return vec4(bitfieldExtract(q, 0, 8), bitfieldExtract(q, 8, 8), bitfieldExtract(q, 16, 8), q >> 24);
}
float add_four(uint w, vec4 a, float sum) {
    const vec4 four = unpacked(w);
    return fma(four.w, a.w, fma(four.z, a.z, fma(four.y, a.y, fma(four.x, a.x, sum))));
}
#else
#define SUM int
#define Activations ActivationBlock
int add_four(uint w, uint a, int sum) { return sum + dotPacked4x8EXT(int(w), int(a)); }
#endif

// Adds to `d` the dot product of unit `u` of the weights and its part of a block of activations.
int dot_unit(uvec4 w, Activations a, uint u, int d) {
    SUM sum = SUM(d);
#if defined(WEIGHT_INT4)
    [[unroll]] for (uint j = 0; j < 4; j++) {
        sum = add_four(w[j] & 0x0f0f0f0fu, a.low[j], sum);
        sum = add_four(w[j] >> 4 & 0x0f0f0f0fu, a.high[j], sum);
    }
#else
    [[unroll]] for (uint j = 0; j < 4; j++) sum = add_four(w[j], u == 0 ? a.low[j] : a.high[j], sum);
#endif
    return int(sum);
}

// Adds the contribution of a block to `acc`.
float folded(Weights w, Activations a, float scale, uint a_sums, vec2 s[UNITS], float acc) {
    // Stored integers are too large by BIAS. The sums of the activations correct the dot products for that.
    const int correction = BIAS / 8 * sum_by_minus_8(a_sums);
#if defined(WEIGHT_INT4)
    acc = fma(float(dot_unit(w.units[0], a, 0, correction)), s[0].x * scale, acc);
#if defined(SHIFTED)
    acc = fma(float(sum_of(a_sums)), s[0].y * scale, acc);
#endif
#elif defined(SCALES_ROW)
    acc = fma(float(dot_unit(w.units[1], a, 1, dot_unit(w.units[0], a, 0, 0))), scale, acc);
#else
    if (SCALE_BLOCKS % UNITS == 0) {
        const int d = dot_unit(w.units[0], a, 0, correction);
        acc = fma(float(dot_unit(w.units[1], a, 1, d)), s[0].x * scale, acc);
#if defined(SHIFTED)
        acc = fma(float(sum_of(a_sums)), s[0].y * scale, acc);
#endif
    } else {
        const int low = low_sum(a_sums), high = high_sum(a_sums);
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
