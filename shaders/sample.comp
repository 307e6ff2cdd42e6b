// Samples one id per row of logits: writes ids[row], and sampled[slot] for the next step's embedding.
//
//   logits    f32 [rows, *], rows logits_stride apart; ids >= vocab are padding and never drawn
//   adjusted  u32 [rows, *], laid out like logits: the changes by penalties and biases (adjust.comp)
//   masks     u32 [*, mask_words]: bit id % 32 of word id / 32 is set if an id is allowed
//
// With temperature 0 the result is the id of the highest logit; among equals, the lowest id. Otherwise z = (logit -
// max) / temperature, and min_p, top_k and top_p, in this order, each give a threshold for the logits. The threshold of
// top_k is the k-th largest logit. The threshold of top_p is the largest value such that the ids at or above it have at
// least top_p of the mass of the remaining ids. Ids equal to a threshold are kept. The sample is the Gumbel maximum,
// argmax(z - log(E)), where E is exponentially distributed, from Philox4x32-10 with key = seed and counter = (position,
// id / 4). It does not depend on the rest of the batch or on the number of workgroups.
//
// If a logit is not finite or is the largest finite number, or if every id is forbidden, the id is 0xffffffff, which
// the host reports as an error.
//
// A row is divided into chunks of CHUNK ids, one for each workgroup. Masses are integers (common/mass.glsl), so the
// order of their sums does not matter.
//
//   maxima  [rows, chunks] of (f32 highest logit, f32 lowest allowed logit, id of the highest, 0)
//   bins    [rows, 3, BINS], initially 0: a histogram of the ids by the distance of their logit from the maximum. The
//           first bin is nearest to the maximum. Each bin has the number of its ids and the 64-bit sum of their masses
//   found   [rows, found_stride]: for each chunk, the best of the ids that are certainly kept (f32, id), and the best
//           of the undecided ids (f32, id); LIST pairs of undecided ids (ordered logit, id); LIST ordered logits of the
//           bin with the k-th largest logit. After all rows follow TALLIES words of each row, initially 0: the length
//           of the first list, its largest ordered logit, the complement of its smallest; then the same for the
//           second list
//
//   MAXIMA  writes maxima
//   MASSES  computes the bins, for rows with top_k or top_p
//   DRAW    finds the bins of the thresholds. Ids in higher bins are kept, and the best of them is found. Ids in the
//           thresholds' bins are undecided, and are listed
//   CHOICE  finds the thresholds among the listed ids, and the best of all kept ids. A workgroup processes one row
//   GREEDY  finds the best of maxima, for rows with temperature 0
//
// If there are more undecided ids than LIST, and their logits are not all equal, CHOICE reads the whole row instead: it
// finds the thresholds by bisection over the bit patterns of the logits.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "draws.glsl"
#include "mass.glsl"

layout(local_size_x = 256) in;

const uint WORKGROUP = 256;
const uint CHUNK = 4096;
const uint BINS = 1024;
const uint LIST = 4096;
const uint TALLIES = 8;

#ifdef MAXIMA
#define MaximaOf WriteUvec4s
#else
#define MaximaOf ReadUvec4s
#endif
#ifdef MASSES
#define BinsOf Words
#else
#define BinsOf ReadUints
#endif
#ifdef DRAW
#define FoundOf Words
#else
#define FoundOf ReadUints
#endif

layout(push_constant, std430) uniform Push {
    ReadVec4s logits;
    ReadUvec4s adjusted;
    ReadUints masks;
    Requests requests;
    MaximaOf maxima;
    BinsOf bins;
    FoundOf found;
    WriteUints ids;
    WriteUints sampled;
    uint vocab;
    uint logits_stride;
    uint mask_words;
    uint tallies;
};

uint chunks() { return (vocab + CHUNK - 1) / CHUNK; }
uint found_stride() { return 4 * chunks() + 3 * LIST; }

// Maps floats to unsigned integers with the same order, and back.
uint ordered(float f) {
    const uint bits = floatBitsToUint(f);
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
float unordered(uint key) { return uintBitsToFloat(key >> 31 != 0 ? key & 0x7fffffffu : ~key); }

// Whether a row needs bins and lists.
bool is_filtered(Request request) {
    return request.temperature > 0.0 && ((request.top_k > 0 && request.top_k < vocab) || request.top_p < 1.0);
}

uint row_of_logits, mask_base;
bool is_adjusted, is_masked;

void find_row(uint row, Request request) {
    row_of_logits = row * logits_stride / 4;
    is_adjusted = request.history_len > 0 || request.biases > 0;
    is_masked = request.mask > 0;
    mask_base = is_masked ? (request.mask - 1) * mask_words : 0;
}

// The logits of the four ids from 4 * `four`: raw_logits before, changed_logits after penalties, biases and the mask.
vec4 raw_logits(uint four) { return logits.at[row_of_logits + four]; }
vec4 changed_logits(uint four, vec4 raw) {
    if (is_adjusted) {
        const uvec4 words = adjusted.at[row_of_logits + four];
        [[unroll]] for (uint j = 0; j < 4; j++) raw[j] = adjusted_logit(words[j], raw[j]);
    }
    if (is_masked) {
        const uint allowed = masks.at[mask_base + four / 8] >> (four % 8 * 4);
        [[unroll]] for (uint j = 0; j < 4; j++) {
            if ((allowed >> j & 1) == 0) raw[j] = FORBIDDEN;
        }
    }
    return raw;
}
// Memory after the vocabulary may contain any values, so they are not used in arithmetic.
vec4 logits_of(uint four) {
    vec4 changed = changed_logits(four, raw_logits(four));
    [[unroll]] for (uint j = 0; j < 4; j++) {
        if (four * 4 + j >= vocab) changed[j] = FORBIDDEN;
    }
    return changed;
}

// The id with the highest value; among equals, the lowest id.
struct Best {
    float value;
    uint id;
};
const Best NOTHING = Best(LOWEST, NONE);

void consider(inout Best best, float value, uint id) {
    if (value > best.value || (value == best.value && id < best.id)) best = Best(value, id);
}

shared float tree_values[WORKGROUP], tree_lows[WORKGROUP];
shared uint tree_ids[WORKGROUP];

// The best over all invocations. `low` becomes the minimum of their `low`.
Best best_of_all(Best best, inout float low) {
    const uint i = gl_LocalInvocationID.x;
    tree_values[i] = best.value;
    tree_ids[i] = best.id;
    tree_lows[i] = low;
    barrier();
    // Not unrolled, because compilers for CPUs are slow with many barriers.
    [[dont_unroll]] for (uint half_size = WORKGROUP / 2; half_size > 0; half_size /= 2) {
        if (i < half_size) {
            consider(best, tree_values[i + half_size], tree_ids[i + half_size]);
            low = min(low, tree_lows[i + half_size]);
            tree_values[i] = best.value;
            tree_ids[i] = best.id;
            tree_lows[i] = low;
        }
        barrier();
    }
    best = Best(tree_values[0], tree_ids[0]);
    low = tree_lows[0];
    barrier();
    return best;
}

#ifndef MAXIMA
// A row's highest logit and lowest allowed logit, and values that are derived from them and the request.
float maximum, lowest;
float lowest_half, twice_inverse;
uint least_key;
float bin_scale;
uint bin_ratio;

// Whether a row can be sampled: some id is allowed, and no logit is too large.
bool is_one() { return maximum > FORBIDDEN && maximum < HIGHEST; }

Best find_maximum(uint row) {
    Best best = NOTHING;
    lowest = HIGHEST;
    for (uint chunk = gl_LocalInvocationID.x; chunk < chunks(); chunk += WORKGROUP) {
        const uvec4 of_chunk = maxima.at[row * chunks() + chunk];
        consider(best, uintBitsToFloat(of_chunk.x), of_chunk.z);
        lowest = min(lowest, uintBitsToFloat(of_chunk.y));
    }
    best = best_of_all(best, lowest);
    maximum = best.value;
    return best;
}

// (logit - maximum) / temperature, which is at most 0. The factor 1/2 keeps the difference finite. All logits that are
// too low to matter get the same value.
float z_of(float logit) { return max(logit * 0.5 - maximum * 0.5, lowest_half) * twice_inverse; }
float powers_below(float z) { return z * -1.4426950408889634; }

// Requires finite logits and a temperature above 0.
void find_scale(Request request) {
    const float temperature = bounded(request.temperature);
    twice_inverse = reciprocal(temperature) * 2.0;
    lowest_half = -100.0 * temperature;
    // The logarithm of 1 may differ from 0 on some devices, hence the minimum.
    const uint of_min_p = ordered(maximum + log(max(request.min_p, 1e-37)) * temperature);
    least_key = request.min_p > 0.0 ? min(of_min_p, ordered(maximum)) : 0;
    // The bins divide the range from the highest logit to the lowest that matters evenly, with integers of 20 bits.
    const float most = min(powers_below(z_of(lowest)), WEIGHTLESS);
    const uint exponent = max(floatBitsToUint(most) >> 23, 20);
    bin_scale = uintBitsToFloat((273 - exponent) << 23);
    bin_ratio = 0xffffffffu / (uint(most * bin_scale) + 1);
}

// Whether an id may be drawn, according to min_p and its own mass.
bool may_come(float logit, float t) { return logit > FORBIDDEN && t < WEIGHTLESS && ordered(logit) >= least_key; }

uint bin_of(float t) { return high_product(uint(t * bin_scale) * BINS, bin_ratio); }
#endif

#if defined(DRAW) || defined(CHOICE)
uvec4 philox(uvec2 key, uvec4 counter) {
    for (uint round = 0; round < 10; round++) {
        uint hi0, lo0, hi1, lo1;
        umulExtended(0xD2511F53u, counter.x, hi0, lo0);
        umulExtended(0xCD9E8D57u, counter.z, hi1, lo1);
        counter = uvec4(hi1 ^ counter.y ^ key.x, lo1, hi0 ^ counter.w ^ key.y, lo0);
        key += uvec2(0x9E3779B9u, 0xBB67AE85u);
    }
    return counter;
}

uvec4 noise(Request request, uint four) {
    return philox(uvec2(request.seed_low, request.seed_high), uvec4(request.position, four, 0, 0));
}

// -log of an exponential variate -log(1 - v). The largest results come from v near 0, where 1 - v would round bits
// away, so a series is used there.
float gumbel(uint random) {
    const float v = (float(random) + 0.5) * 2.3283064365386963e-10;
    const float exponential = v < 0.01 ? v * (1.0 + v * (0.5 + v / 3.0)) : -log(max(1.0 - v, 1e-30));
    return -log(exponential);
}

// What the bins of a row determine about its thresholds.
struct Cut {
    // Ids in bins before `first` are kept, ids in bins after `last` are dropped. `undecided` is the number of ids in
    // the bins from `first` to `last`, mass_above the mass of the bins before `first`.
    uint first, last, undecided;
    uvec2 mass_above;
    // Whether there are at least top_k ids. If so: the bin of the k-th id, the numbers of ids before that bin and in
    // it, and their masses.
    bool has_kth;
    uint kth_bin, count_above_kth, count_of_kth;
    uvec2 mass_above_kth, mass_of_kth;
    // Whether the threshold of top_p depends on which ids of that bin are kept.
    bool lists_kth;
    // The mass of all bins.
    uvec2 total;
};

shared uint running_counts[WORKGROUP], running_lows[WORKGROUP], running_highs[WORKGROUP];
shared uint cut_words[16];

Cut cut_of(uint row, Request request) {
    const uint lane = gl_LocalInvocationID.x, mine = BINS / WORKGROUP;
    const bool by_p = request.top_p < 1.0;
    uint counts[mine];
    uvec2 masses[mine];
    uint count = 0;
    uvec2 mass = uvec2(0);
    [[unroll]] for (uint j = 0; j < mine; j++) {
        const uint at = row * 3 * BINS + lane * mine + j;
        counts[j] = bins.at[at];
        masses[j] = uvec2(bins.at[at + BINS], bins.at[at + 2 * BINS]);
        count += counts[j];
        mass = add64(mass, masses[j]);
    }
    uint count_through = count;
    uvec2 mass_through = mass;
    for (uint distance = 1; distance < WORKGROUP; distance *= 2) {
        running_counts[lane] = count_through;
        running_lows[lane] = mass_through.x;
        running_highs[lane] = mass_through.y;
        barrier();
        if (lane >= distance) {
            const uint from = lane - distance;
            count_through += running_counts[from];
            mass_through = add64(mass_through, uvec2(running_lows[from], running_highs[from]));
        }
        barrier();
    }
    if (lane == WORKGROUP - 1) {
        cut_words[0] = count_through;
        cut_words[1] = mass_through.x;
        cut_words[2] = mass_through.y;
    }
    barrier();
    Cut cut;
    cut.total = uvec2(cut_words[1], cut_words[2]);
    cut.has_kth = request.top_k > 0 && request.top_k < vocab && request.top_k <= cut_words[0];
    cut.kth_bin = BINS;
    cut.lists_kth = false;
    cut.mass_above = uvec2(0);
    uvec2 wanted_least = share(cut.total, request.top_p), wanted_most = wanted_least;

    if (cut.has_kth) {
        uint before = count_through - count;
        uvec2 mass_before = subtract64(mass_through, mass);
        [[unroll]] for (uint j = 0; j < mine; j++) {
            if (before < request.top_k && request.top_k <= before + counts[j]) {
                cut_words[3] = lane * mine + j;
                cut_words[4] = before;
                cut_words[5] = counts[j];
                cut_words[6] = mass_before.x;
                cut_words[7] = mass_before.y;
                cut_words[8] = masses[j].x;
                cut_words[9] = masses[j].y;
            }
            before += counts[j];
            mass_before = add64(mass_before, masses[j]);
        }
        barrier();
        cut.kth_bin = cut_words[3];
        cut.count_above_kth = cut_words[4];
        cut.count_of_kth = cut_words[5];
        cut.mass_above_kth = uvec2(cut_words[6], cut_words[7]);
        cut.mass_of_kth = uvec2(cut_words[8], cut_words[9]);
        // If the k-th id is the last of its bin, the whole bin is kept.
        const bool is_whole = cut.count_above_kth + cut.count_of_kth == request.top_k;
        cut.lists_kth = by_p && !is_whole;
        const uvec2 through = add64(cut.mass_above_kth, cut.mass_of_kth);
        wanted_least = share(is_whole ? through : cut.mass_above_kth, request.top_p);
        wanted_most = share(through, request.top_p);
        cut.first = cut.kth_bin + uint(is_whole);
        cut.last = cut.kth_bin;
        cut.undecided = is_whole ? 0 : cut.count_of_kth;
    } else {
        cut.first = BINS;
        cut.last = 0;
        cut.undecided = 0;
    }

    if (by_p) {
        if (lane == 0) {
            // These initial values are used for a top_p of 0, which keeps only the highest ids.
            cut_words[10] = 0;
            cut_words[11] = 0;
            cut_words[12] = 0;
            cut_words[13] = 0;
            cut_words[14] = 0;
            cut_words[15] = counts[0];
        }
        barrier();
        uint before = count_through - count;
        uvec2 mass_before = subtract64(mass_through, mass);
        [[unroll]] for (uint j = 0; j < mine; j++) {
            const uvec2 through = add64(mass_before, masses[j]);
            if (less64(mass_before, wanted_least) && !less64(through, wanted_least)) {
                cut_words[10] = lane * mine + j;
                cut_words[11] = before;
                cut_words[12] = mass_before.x;
                cut_words[13] = mass_before.y;
            }
            if (less64(mass_before, wanted_most) && !less64(through, wanted_most)) {
                cut_words[14] = lane * mine + j;
                cut_words[15] = before + counts[j];
            }
            before += counts[j];
            mass_before = through;
        }
        barrier();
        cut.first = cut_words[10];
        cut.last = cut_words[14];
        cut.undecided = cut_words[15] - cut_words[11];
        cut.mass_above = uvec2(cut_words[12], cut_words[13]);
    }
    return cut;
}
#endif

#if defined(MAXIMA)
void main() {
    const uint chunk = gl_WorkGroupID.x, row = gl_WorkGroupID.y;
    find_row(row, requests.at[row]);
    Best best = NOTHING;
    float low = HIGHEST;
    const uint last = min((chunk + 1) * CHUNK, vocab);
    for (uint four = chunk * CHUNK / 4 + gl_LocalInvocationID.x; four * 4 < last; four += WORKGROUP) {
        const vec4 raw = raw_logits(four), changed = changed_logits(four, raw);
        [[unroll]] for (uint j = 0; j < 4; j++) {
            if (four * 4 + j < last) {
                // A logit that is not finite must not be hidden by a comparison or a mask. It counts as the highest
                // logit, so the row gives the id 0xffffffff.
                const float logit = is_finite(raw[j]) ? changed[j] : HIGHEST;
                if (logit > best.value || best.id == NONE) best = Best(logit, four * 4 + j);
                if (logit > FORBIDDEN) low = min(low, logit);
            }
        }
    }
    best = best_of_all(best, low);
    if (gl_LocalInvocationID.x == 0) {
        maxima.at[row * chunks() + chunk] = uvec4(floatBitsToUint(best.value), floatBitsToUint(low), best.id, 0);
    }
}

#elif defined(MASSES)
shared uint counts[BINS], lows[BINS], highs[BINS];

void main() {
    const uint lane = gl_LocalInvocationID.x, chunk = gl_WorkGroupID.x, row = gl_WorkGroupID.y;
    const Request request = requests.at[row];
    if (!is_filtered(request)) return;
    find_maximum(row);
    if (!is_one()) return;
    find_row(row, request);
    find_scale(request);
    for (uint bin = lane; bin < BINS; bin += WORKGROUP) {
        counts[bin] = 0;
        lows[bin] = 0;
        highs[bin] = 0;
    }
    barrier();
    // A chunk has few enough ids that the sums of the low and high parts of their masses each fit into 32 bits.
    const uint last = min((chunk + 1) * CHUNK, vocab);
    for (uint four = chunk * CHUNK / 4 + lane; four * 4 < last; four += WORKGROUP) {
        const vec4 x = logits_of(four);
        [[unroll]] for (uint j = 0; j < 4; j++) {
            const float t = powers_below(z_of(x[j]));
            if (may_come(x[j], t)) {
                const uint bin = bin_of(t);
                const uvec2 parts = mass(t);
                atomicAdd(counts[bin], 1);
                atomicAdd(lows[bin], parts.x);
                atomicAdd(highs[bin], parts.y);
            }
        }
    }
    barrier();
    for (uint bin = lane; bin < BINS; bin += WORKGROUP) {
        if (counts[bin] > 0) {
            const uint at = row * 3 * BINS + bin;
            uvec2 sum = joined(uvec2(lows[bin], highs[bin]));
            atomicAdd(bins.at[at], counts[bin]);
            // Each carry out of the low 32 bits is seen by exactly one chunk, in any order of the chunks.
            const uint before = atomicAdd(bins.at[at + BINS], sum.x);
            sum.y += uint(before + sum.x < before);
            atomicAdd(bins.at[at + 2 * BINS], sum.y);
        }
    }
}

#elif defined(DRAW)
// The largest ordered logit and the complement of the smallest, for both lists.
shared uint ends[4];

void main() {
    const uint lane = gl_LocalInvocationID.x, chunk = gl_WorkGroupID.x, row = gl_WorkGroupID.y;
    const Request request = requests.at[row];
    if (!(request.temperature > 0.0)) return;
    find_maximum(row);
    if (!is_one()) return;
    find_row(row, request);
    find_scale(request);
    Cut cut;
    cut.first = BINS;
    cut.last = 0;
    cut.undecided = 0;
    cut.lists_kth = false;
    if (is_filtered(request)) cut = cut_of(row, request);
    const bool fits = cut.undecided <= LIST, kth_fits = cut.lists_kth && cut.count_of_kth <= LIST;
    const uint own = row * found_stride(), list = own + 4 * chunks(), kth_list = list + 2 * LIST;
    const uint tally = tallies + row * TALLIES;
    if (lane < 4) ends[lane] = 0;
    barrier();

    Best best = NOTHING, undecided = NOTHING;
    uvec4 own_ends = uvec4(0);
    const uint last = min((chunk + 1) * CHUNK, vocab);
    for (uint four = chunk * CHUNK / 4 + lane; four * 4 < last; four += WORKGROUP) {
        const vec4 x = logits_of(four);
        vec4 z;
        bvec4 is_in = bvec4(false), is_undecided = bvec4(false);
        [[unroll]] for (uint j = 0; j < 4; j++) {
            z[j] = z_of(x[j]);
            const float t = powers_below(z[j]);
            if (may_come(x[j], t)) {
                const uint bin = bin_of(t), key = ordered(x[j]);
                is_in[j] = bin < cut.first;
                is_undecided[j] = bin >= cut.first && bin <= cut.last;
                if (is_undecided[j]) {
                    own_ends.xy = max(own_ends.xy, uvec2(key, ~key));
                    if (fits) {
                        const uint at = list + 2 * atomicAdd(found.at[tally], 1);
                        found.at[at] = key;
                        found.at[at + 1] = four * 4 + j;
                    }
                }
                if (cut.lists_kth && bin == cut.kth_bin) {
                    own_ends.zw = max(own_ends.zw, uvec2(key, ~key));
                    if (kth_fits) found.at[kth_list + atomicAdd(found.at[tally + 3], 1)] = key;
                }
            }
        }
        if (any(is_in) || (!fits && any(is_undecided))) {
            const uvec4 random = noise(request, four);
            [[unroll]] for (uint j = 0; j < 4; j++) {
                if (is_in[j] || is_undecided[j]) {
                    const float value = z[j] + gumbel(random[j]);
                    if (is_in[j]) consider(best, value, four * 4 + j);
                    else consider(undecided, value, four * 4 + j);
                }
            }
        }
    }
    [[unroll]] for (uint end = 0; end < 4; end++) {
        if (own_ends[end] > 0) atomicMax(ends[end], own_ends[end]);
    }
    float none = 0.0;
    best = best_of_all(best, none);
    if (!fits) undecided = best_of_all(undecided, none);
    if (lane == 0) {
        found.at[own + 4 * chunk] = floatBitsToUint(best.value);
        found.at[own + 4 * chunk + 1] = best.id;
        found.at[own + 4 * chunk + 2] = floatBitsToUint(undecided.value);
        found.at[own + 4 * chunk + 3] = undecided.id;
    }
    if (lane < 4 && ends[lane] > 0) atomicMax(found.at[tally + lane + 1 + lane / 2], ends[lane]);
}

#elif defined(CHOICE)
// A list of ordered logits that are `stride` words apart. A count of 0 means the whole row.
struct Keys {
    uint at, stride, count;
};

shared uint weighed[3];

// The number and the mass of the ids whose ordered logit is at least `key`.
uvec3 weigh(Keys keys, uint key) {
    const uint lane = gl_LocalInvocationID.x;
    uint count = 0;
    uvec2 sum = uvec2(0);
    if (keys.count > 0) {
        for (uint i = lane; i < keys.count; i += WORKGROUP) {
            const uint other = found.at[keys.at + i * keys.stride];
            if (other >= key) {
                count += 1;
                sum = add64(sum, joined(mass(powers_below(z_of(unordered(other))))));
            }
        }
    } else {
        for (uint four = lane; four * 4 < vocab; four += WORKGROUP) {
            const vec4 x = logits_of(four);
            [[unroll]] for (uint j = 0; j < 4; j++) {
                const float t = powers_below(z_of(x[j]));
                if (may_come(x[j], t) && ordered(x[j]) >= key) {
                    count += 1;
                    sum = add64(sum, joined(mass(t)));
                }
            }
        }
    }
    barrier();
    if (lane < 3) weighed[lane] = 0;
    barrier();
    if (count > 0) {
        atomicAdd(weighed[0], count);
        const uint before = atomicAdd(weighed[1], sum.x);
        atomicAdd(weighed[2], sum.y + uint(before + sum.x < before));
    }
    barrier();
    return uvec3(weighed[0], weighed[1], weighed[2]);
}

// The largest key in `low`..`high` such that at least `count` ids are at or above it. With a count of 0, the largest
// key such that the mass of the ids at or above it, plus the mass `above`, is at least `wanted`.
uint threshold_of(Keys keys, uint low, uint high, uint count, uvec2 above, uvec2 wanted) {
    while (low < high) {
        const uint middle = low + (high - low) / 2 + 1;
        const uvec3 there = weigh(keys, middle);
        const bool enough = count > 0 ? there.x >= count : !less64(add64(above, there.yz), wanted);
        if (enough) low = middle;
        else high = middle - 1;
    }
    return low;
}

void main() {
    const uint lane = gl_LocalInvocationID.x, row = gl_WorkGroupID.x;
    const Request request = requests.at[row];
    Best best = find_maximum(row);
    if (request.temperature > 0.0 && is_one()) {
        find_row(row, request);
        find_scale(request);
        const uint own = row * found_stride(), tally = tallies + row * TALLIES;
        Keys list = Keys(own + 4 * chunks(), 2, 0);
        uint threshold = least_key;
        bool takes_undecided = false, takes_row = false;
        if (is_filtered(request)) {
            const Cut cut = cut_of(row, request);
            const uint high = found.at[tally + 1], low = ~found.at[tally + 2];
            const uint kth_high = found.at[tally + 4], kth_low = ~found.at[tally + 5];
            takes_row = (cut.undecided > LIST && low != high)
                || (cut.lists_kth && cut.count_of_kth > LIST && kth_low != kth_high);
            takes_undecided = cut.undecided > LIST;
            const uvec2 none = uvec2(0);
            uvec2 left = cut.total;
            if (takes_row) {
                const Keys all = Keys(0, 0, 0);
                const uint highest = ordered(maximum);
                if (cut.has_kth) threshold = threshold_of(all, least_key, highest, request.top_k, none, none);
                if (request.top_p < 1.0) {
                    const uvec2 wanted = share(weigh(all, threshold).yz, request.top_p);
                    threshold = threshold_of(all, threshold, highest, 0, none, wanted);
                }
            } else if (request.top_p < 1.0) {
                if (cut.has_kth) {
                    uvec2 of_kth = cut.mass_of_kth;
                    if (cut.lists_kth && cut.count_of_kth <= LIST) {
                        const Keys keys = Keys(list.at + 2 * LIST, 1, cut.count_of_kth);
                        const uint count = request.top_k - cut.count_above_kth;
                        const uint kth = threshold_of(keys, kth_low, kth_high, count, none, none);
                        of_kth = weigh(keys, kth).yz;
                    }
                    left = add64(cut.mass_above_kth, of_kth);
                }
                threshold = high;
                if (!takes_undecided) {
                    list.count = cut.undecided;
                    threshold = threshold_of(list, low, high, 0, cut.mass_above, share(left, request.top_p));
                }
            } else if (cut.undecided > 0) {
                threshold = high;
                if (!takes_undecided) {
                    list.count = cut.undecided;
                    threshold = threshold_of(list, low, high, request.top_k - cut.count_above_kth, none, none);
                }
            }
        }
        best = NOTHING;
        if (takes_row) {
            for (uint four = lane; four * 4 < vocab; four += WORKGROUP) {
                const vec4 x = logits_of(four);
                const uvec4 random = noise(request, four);
                [[unroll]] for (uint j = 0; j < 4; j++) {
                    const float z = z_of(x[j]);
                    if (may_come(x[j], powers_below(z)) && ordered(x[j]) >= threshold) {
                        consider(best, z + gumbel(random[j]), four * 4 + j);
                    }
                }
            }
        } else {
            for (uint chunk = lane; chunk < chunks(); chunk += WORKGROUP) {
                const uint at = own + 4 * chunk;
                const uint id = found.at[at + 1], other = found.at[at + 3];
                if (id != NONE) consider(best, uintBitsToFloat(found.at[at]), id);
                if (takes_undecided && other != NONE) consider(best, uintBitsToFloat(found.at[at + 2]), other);
            }
            for (uint i = lane; i < list.count; i += WORKGROUP) {
                const uint key = found.at[list.at + 2 * i], id = found.at[list.at + 2 * i + 1];
                if (key >= threshold) {
                    const uint random = noise(request, id / 4)[id % 4];
                    consider(best, z_of(unordered(key)) + gumbel(random), id);
                }
            }
        }
        float none = 0.0;
        best = best_of_all(best, none);
    }
    if (lane == 0) {
        ids.at[row] = is_one() ? best.id : NONE;
        // The next step may read this id before the host sees the failure, so it must be a valid row of the embedding.
        sampled.at[request.slot] = is_one() ? best.id : 0;
    }
}

#else
void main() {
    const uint row = gl_WorkGroupID.x;
    const Best best = find_maximum(row);
    if (gl_LocalInvocationID.x == 0) {
        ids.at[row] = is_one() ? best.id : NONE;
        // The next step may read this id before the host sees the failure, so it must be a valid row of the embedding.
        sampled.at[requests.at[row].slot] = is_one() ? best.id : 0;
    }
}
#endif
