// The router of a mixture of experts: for each token, its experts and their weights.
//
//   logit[e]       = factor * sum over i of norm(x[t])[i] * W[e, i]
//   norm(x)[i]     = x[i] / sqrt(mean(x^2) + eps) * weight[i]
//   experts[t, r]  the PER_TOKEN experts with the largest logits, the largest first; of equal ones, the lower number
//   weights[t, r]  exp(logit - the largest logit) / (the sum of these over all experts, or over the chosen ones if
//                  RENORMALIZED), times scale[expert] if there are scales
//
//   x f32 [tokens, dim]; W f32 [EXPERTS, dim]; weight f32 [dim]; dim is a multiple of 4
//
// A workgroup computes one token. Eight lanes share the product of an expert, each with every eighth group of four
// columns, and their sums are added in one order. Logits are compared by their bits, so that the experts of a token are
// PER_TOKEN different ones even if its logits are NaN.
//
// If the step has one token, the kernel also writes what group_pairs.comp writes for more tokens, apart from workgroup
// counts.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "lanes.glsl"
#include "reduce.glsl"
#include "columns.glsl"

layout(local_size_x = INVOCATIONS) in;

layout(constant_id = 0) const uint EXPERTS = 8;
layout(constant_id = 1) const uint PER_TOKEN = 2;
layout(constant_id = 2) const uint RENORMALIZED = 1;

layout(push_constant, std430) uniform Push {
    ReadVec4s x;
    ReadVec4s weight;
    ReadVec4s router;
    ReadFloats scale_or_none;
    WriteUints experts;
    WriteFloats weights;
    WriteUints rows;
    WriteUints positions;
    WriteUvec4s items;
    Uints used;
    uint dim;
    float eps;
    float factor;
};

// Lanes of an expert, and experts whose products are computed at the same time.
const uint SHARE = 8, TOGETHER = WORKGROUP / SHARE;
const uint ROUNDS = (EXPERTS + TOGETHER - 1) / TOGETHER;
// Bounds of EXPERTS and PER_TOKEN.
const uint MOST_EXPERTS = 256, MOST_PER_TOKEN = 32;

shared vec4 normed[WORKGROUP];
shared float partial[MOST_EXPERTS][SHARE];
shared float logits[MOST_EXPERTS];
shared uint chosen[MOST_PER_TOKEN];

// An integer whose order is that of the values. A NaN is above or below all numbers. Both zeros are equal.
uint order_of(float value) {
    const uint bits = value == 0.0 ? 0 : floatBitsToUint(value);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

void main() {
    const uint token = gl_WorkGroupID.x, fours = dim / 4, from = token * fours;
    for (uint turn = 0; turn < TURNS; turn++) {
        float squares = 0.0;
        for (uint i = lane_of(turn); i < fours; i += WORKGROUP) squares = add_squares(squares, x.at[from + i]);
        share(lane_of(turn), squares);
    }
    const float norm = inversesqrt(workgroup_sum() / float(dim) + eps);

    float acc[TURNS][ROUNDS];
    [[unroll]] for (uint turn = 0; turn < TURNS; turn++)
        [[unroll]] for (uint n = 0; n < ROUNDS; n++) acc[turn][n] = 0.0;
    for (uint first = 0; first < fours; first += WORKGROUP) {
        for (uint turn = 0; turn < TURNS; turn++) {
            const uint i = first + lane_of(turn);
            if (i < fours) normed[lane_of(turn)] = x.at[from + i] * norm * weight.at[i];
        }
        barrier();
        [[unroll]] for (uint turn = 0; turn < TURNS; turn++) {
            const uint lane = lane_of(turn), own = lane % SHARE;
            [[unroll]] for (uint n = 0; n < ROUNDS; n++) {
                const uint expert = n * TOGETHER + lane / SHARE;
                if (expert >= EXPERTS) continue;
                float sum = acc[turn][n];
                for (uint i = own; i < min(WORKGROUP, fours - first); i += SHARE) {
                    const vec4 v = normed[i], w = router.at[expert * fours + first + i];
                    sum = fma(w.w, v.w, fma(w.z, v.z, fma(w.y, v.y, fma(w.x, v.x, sum))));
                }
                acc[turn][n] = sum;
            }
        }
        barrier();
    }
    [[unroll]] for (uint turn = 0; turn < TURNS; turn++) {
        const uint lane = lane_of(turn);
        [[unroll]] for (uint n = 0; n < ROUNDS; n++) partial[n * TOGETHER + lane / SHARE][lane % SHARE] = acc[turn][n];
    }
    barrier();
    for (uint expert = gl_LocalInvocationID.x; expert < EXPERTS; expert += INVOCATIONS) {
        const float a = (partial[expert][0] + partial[expert][1]) + (partial[expert][2] + partial[expert][3]);
        const float b = (partial[expert][4] + partial[expert][5]) + (partial[expert][6] + partial[expert][7]);
        logits[expert] = (a + b) * factor;
    }
    barrier();

    // The rank of an expert is the number of experts before it. Ranks differ, because equal logits are ranked by number.
    for (uint expert = gl_LocalInvocationID.x; expert < EXPERTS; expert += INVOCATIONS) {
        const uint own = order_of(logits[expert]);
        uint rank = 0;
        for (uint other = 0; other < EXPERTS; other++) {
            const uint theirs = order_of(logits[other]);
            if (theirs > own || theirs == own && other < expert) rank++;
        }
        if (rank < PER_TOKEN) chosen[rank] = expert;
    }
    barrier();
    const float largest = logits[chosen[0]];
    float sum = 0.0;
    if (RENORMALIZED == 1) {
        for (uint r = 0; r < PER_TOKEN; r++) sum += exp(logits[chosen[r]] - largest);
    } else {
        for (uint turn = 0; turn < TURNS; turn++) {
            const uint lane = lane_of(turn);
            share(lane, lane < EXPERTS ? exp(logits[lane] - largest) : 0.0);
        }
        sum = workgroup_sum();
    }
    for (uint r = gl_LocalInvocationID.x; r < PER_TOKEN; r += INVOCATIONS) {
        const uint expert = chosen[r], at = token * PER_TOKEN + r;
        float value = exp(logits[expert] - largest) / sum;
        if (uvec2(scale_or_none) != uvec2(0)) value *= scale_or_none.at[expert];
        experts.at[at] = expert;
        weights.at[at] = value;
        if (gl_NumWorkGroups.x == 1) {
            rows.at[r] = 0;
            positions.at[r] = r;
            items.at[r] = uvec4(expert, r, 1, 0);
            if (r == 0) used.at[0] += PER_TOKEN;
        }
    }
}
