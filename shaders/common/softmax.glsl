// A partial is the attention over some keys: the largest score, the sum of the weights, and the values weighted by
// them, both not divided yet. Everything has one order, so that a token has the same bits in any batch:
//
//   keys are cut at fixed positions into splits (split_start), and splits into tiles of TILE keys;
//   the keys of a tile are dealt to PARTS lanes in turn, and each lane adds up its keys in order, from tile to tile;
//   at the end of a split the parts are added in order;
//   splits are joined in order (join).
//
// A partial over no keys has the sum 0 and changes nothing.
const uint TILE = 64;
// Below every score, and far enough from the end of the range that a difference of two scores is finite.
const float LOWEST = -1e38;

// Number of splits of 1 unit, and of 4 units; the rest have 16, so that a long context has few splits (`Splits` in
// src/kernels/attention.rs).
const uint SPLITS_OF_1 = 16, SPLITS_OF_4 = 28;

// The first key of a split.
uint split_start(uint split, uint unit, bool grows) {
    if (!grows || split <= SPLITS_OF_1) return split * unit;
    const uint behind = split - SPLITS_OF_1;
    if (behind <= SPLITS_OF_4) return (SPLITS_OF_1 + 4 * behind) * unit;
    return (SPLITS_OF_1 + 4 * SPLITS_OF_4 + 16 * (behind - SPLITS_OF_4)) * unit;
}

// The weight of a score relative to the largest one.
float weight_of(float score, float maximum) { return exp(score - maximum); }

// Joins a partial of later keys: its values, and its largest score with the sum of weights.
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

// The output of attention.
vec4 attended(vec4 values, vec2 score) { return score.y == 0.0 ? vec4(0) : values / score.y; }
