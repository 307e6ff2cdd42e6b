// Draws one token per row of logits: ids[row], and sampled[slot] for the next step's embedding.
//
//   logits    f32 [rows, *], rows logits_stride apart; ids >= vocab are padding and never drawn
//   adjusted  u32 [rows, *], the same: what penalties and biases made of them (adjust.comp)
//   masks     u32 [*, mask_words]: bit id % 32 of word id / 32 is set where an id may come
//
// temperature 0: the highest logit, ties to the lowest id. Else, over z = (logit - max) / temperature: min_p, top_k
// and top_p, in this order, each become a threshold on the logit (top_k: the k-th largest; top_p: the largest value
// with mass >= top_p of what is left; ties at a threshold stay in), found by bisection over the floats' bit
// patterns, so that no vocabulary is too large and nothing needs sorting. The draw is the Gumbel maximum,
// argmax(z - log(E)), E exponential from Philox4x32-10 with key = seed and counter = (position, id / 4): it depends
// on nothing else in the batch.
//
// Logits that are not finite, or as large as a finite number can be, yield id 0xffffffff, which the host reports as an error, and so does a row whose every id
// is forbidden.
//
// A workgroup takes one row.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "reduce.glsl"
#include "argmax.glsl"
#include "draws.glsl"

layout(local_size_x = WORKGROUP) in;

layout(push_constant, std430) uniform Push {
    ReadFloats logits;
    ReadUints adjusted;
    ReadUints masks;
    Requests requests;
    WriteUints ids;
    WriteUints sampled;
    uint vocab;
    uint logits_stride;
    uint mask_words;
};

shared uint counts[WORKGROUP];

// Maps floats to unsigned integers of the same order.
uint ordered(float f) {
    const uint bits = floatBitsToUint(f);
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

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

// -log of an exponential variate. u = 1 - v: near v = 0, where the largest results come from, the series keeps the
// bits that 1 - v would round away.
float gumbel(uint random) {
    const float v = (float(random) + 0.5) * 2.3283064365386963e-10;
    const float exponential = v < 0.01 ? v * (1.0 + v * (0.5 + v / 3.0)) : -log(max(1.0 - v, 1e-30));
    return -log(exponential);
}

uint workgroup_count(uint value) {
    const uint i = gl_LocalInvocationID.x;
    counts[i] = value;
    barrier();
    for (uint half_size = WORKGROUP / 2; half_size > 0; half_size /= 2) {
        if (i < half_size) counts[i] += counts[i + half_size];
        barrier();
    }
    const uint total = counts[0];
    barrier();
    return total;
}

uint base, mask_base;
bool is_adjusted, is_masked;

// What `logit`, the one of an id, became.
float changed_logit(uint id, float logit) {
    if (is_adjusted) logit = adjusted_logit(adjusted.at[base + id], logit);
    if (is_masked && (masks.at[mask_base + id / 32] >> (id % 32) & 1) == 0) logit = FORBIDDEN;
    return logit;
}

float logit_of(uint id) { return changed_logit(id, logits.at[base + id]); }

void main() {
    const uint lane = gl_LocalInvocationID.x, row = gl_WorkGroupID.x;
    const Request request = requests.at[row];
    base = row * logits_stride;
    is_adjusted = request.history_len > 0 || request.biases > 0;
    is_masked = request.mask > 0;
    mask_base = is_masked ? (request.mask - 1) * mask_words : 0;

    float best = LOWEST;
    uint best_id = NONE;
    for (uint i = lane; i < vocab; i += WORKGROUP) {
        float logit = logits.at[base + i];
        // What is not finite must not vanish in comparisons, nor behind a mask: it counts as highest, which is refused below.
        logit = is_finite(logit) ? changed_logit(i, logit) : HIGHEST;
        if (logit > best || best_id == NONE) {
            best = logit;
            best_id = i;
        }
    }
    const float maximum = workgroup_max(best);

    // Of a row that is refused, nothing is drawn: what is not finite has no maximum.
    if (request.temperature > 0.0 && maximum < HIGHEST) {
        // Colder than this is as good as 0, and its inverse might not be finite.
        const float temperature = max(request.temperature, 1e-6), inverse = 1.0 / temperature;
        // Further below the maximum, exp is 0; what is forbidden must not become infinite.
        const float lowest = -200.0 * temperature;
        // Everything at or above `threshold` (in ordered form) is still in.
        uint threshold = 0;
        if (request.min_p > 0.0) threshold = ordered(maximum + log(request.min_p) * temperature);

        if (request.top_k > 0 && request.top_k < vocab) {
            uint low = threshold, high = ordered(maximum);
            while (low < high) {
                const uint middle = low + (high - low) / 2 + 1;
                uint count = 0;
                for (uint i = lane; i < vocab; i += WORKGROUP)
                    count += uint(ordered(logit_of(i)) >= middle);
                if (workgroup_count(count) >= request.top_k) low = middle;
                else high = middle - 1;
            }
            threshold = low;
        }

        if (request.top_p < 1.0) {
            uint low = threshold, high = ordered(maximum);
            float wanted = 0.0;
            // The first round measures the mass of all that is left.
            for (bool first = true; first || low < high; first = false) {
                const uint middle = first ? low : low + (high - low) / 2 + 1;
                float mass = 0.0;
                for (uint i = lane; i < vocab; i += WORKGROUP) {
                    const float logit = logit_of(i);
                    if (ordered(logit) >= middle) mass += exp(max(logit - maximum, lowest) * inverse);
                }
                mass = workgroup_sum(mass);
                if (first) wanted = request.top_p * mass;
                else if (mass >= wanted) low = middle;
                else high = middle - 1;
            }
            threshold = low;
        }

        best = LOWEST;
        best_id = NONE;
        const uvec2 key = uvec2(request.seed_low, request.seed_high);
        for (uint four = lane; four * 4 < vocab; four += WORKGROUP) {
            const uvec4 random = philox(key, uvec4(request.position, four, 0, 0));
            [[unroll]] for (uint j = 0; j < 4; j++) {
                const uint i = four * 4 + j;
                if (i < vocab) {
                    const float logit = logit_of(i);
                    const float value = max(logit - maximum, lowest) * inverse + gumbel(random[j]);
                    if (ordered(logit) >= threshold && (value > best || best_id == NONE)) {
                        best = value;
                        best_id = i;
                    }
                }
            }
        }
    }

    const uint id = workgroup_argmax(best, best_id);
    if (lane == 0) {
        const bool is_one = maximum > FORBIDDEN && maximum < HIGHEST;
        ids.at[row] = is_one ? id : NONE;
        // The next step may read this before the host sees the failure: it must be a row of the embedding.
        sampled.at[request.slot] = is_one ? id : 0;
    }
}
