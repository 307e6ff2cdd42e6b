// What attention keeps of some keys, a partial: the largest score, the weights added up, and the values weighted by them,
// neither divided yet. Behind it stands one order of everything, so that a token has the same bits whoever computes it:
//
//   keys are cut at fixed positions into splits (split_start), and these into tiles of TILE keys;
//   the keys of a tile are dealt to PARTS lanes in turn, each of which adds up its own in order, from tile to tile;
//   at the end of a split the parts are added in order;
//   splits are joined in order (join).
//
// The partial of no keys has the sum 0: it changes nothing.
const uint TILE = 64;
// Below every score, and far enough from the end of the range that a difference of two is finite.
const float LOWEST = -1e38;

// Splits of one unit, then of 4, then of 16, so that a long context has few (`Splits` in src/kernels/attention.rs).
const uint SPLITS_OF_1 = 16, SPLITS_OF_4 = 28;

// The first key of a split.
uint split_start(uint split, uint unit, bool grows) {
    if (!grows || split <= SPLITS_OF_1) return split * unit;
    const uint behind = split - SPLITS_OF_1;
    if (behind <= SPLITS_OF_4) return (SPLITS_OF_1 + 4 * behind) * unit;
    return (SPLITS_OF_1 + 4 * SPLITS_OF_4 + 16 * (behind - SPLITS_OF_4)) * unit;
}

// What a score weighs beside the largest one.
float weight_of(float score, float maximum) { return exp(score - maximum); }

// Adds a partial of later keys: values, and largest score with the sum of weights.
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

// What is attended to.
vec4 attended(vec4 values, vec2 score) { return score.y == 0.0 ? vec4(0) : values / score.y; }
