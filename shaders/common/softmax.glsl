// A partial is the attention over some of the keys, before the division by the sum of weights: the largest score, the
// sum of the weights, and the weighted sum of the values. All sums have a fixed order, so that a token has the same
// bits in any batch:
//
//   keys are cut at fixed positions into splits (split_start), and splits into tiles of TILE keys;
//   the keys of a tile are distributed to PARTS lanes round-robin, and each lane adds up its keys in order;
//   at the end of a split the parts are added in order;
//   splits are joined in order (join).
//
// A partial over no keys has the sum 0 and does not change the result.
const uint TILE = 64;
// Lower than every score, but far enough from the lowest f32 that the difference of two scores is finite.
const float LOWEST = -1e38;

// Number of splits of 1 unit, and of 4 units. All later splits have 16 units, so that a long context has few splits
// (`Splits` in src/kernels/attention.rs).
const uint SPLITS_OF_1 = 16, SPLITS_OF_4 = 28;

// The slots of a token's partials: (first slot, number of slots). The highest bit of the first slot says that they are
// partials of a tile of tokens.
const uint OF_TILES = 0x80000000u;

bool is_in_tiles(uvec2 slots) { return (slots.x & OF_TILES) != 0; }

uint first_slot(uvec2 slots) { return slots.x & ~OF_TILES; }

// The first key of a split.
uint split_start(uint split, uint unit, bool grows) {
    if (!grows || split <= SPLITS_OF_1) return split * unit;
    const uint later = split - SPLITS_OF_1;
    if (later <= SPLITS_OF_4) return (SPLITS_OF_1 + 4 * later) * unit;
    return (SPLITS_OF_1 + 4 * SPLITS_OF_4 + 16 * (later - SPLITS_OF_4)) * unit;
}

// The weight of a score relative to the largest one.
float weight_of(float score, float maximum) { return exp(score - maximum); }

// Merges a partial of later keys into values and score. A score is (largest score, sum of weights).
void join(inout vec4 values, inout vec2 score, vec4 more_values, vec2 more_score) {
    if (more_score.y == 0.0) return;
    if (score.y == 0.0) {
        values = more_values;
        score = more_score;
        return;
    }
    const float maximum = max(score.x, more_score.x);
    const float old = weight_of(score.x, maximum), added = weight_of(more_score.x, maximum);
    values = fma(more_values, vec4(added), values * old);
    score = vec2(maximum, fma(more_score.y, added, score.y * old));
}

// The output of attention, from the partial over all keys.
vec4 attended(vec4 values, vec2 score) { return score.y == 0.0 ? vec4(0) : values / score.y; }
