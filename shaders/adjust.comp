// Changes the logits of few ids: penalties, then biases. Raw logits stay; changes go to `adjusted`, a word for each
// logit (common/draws.glsl), of which the words that no request changes are 0, and all of them are, after `clear`.
//
//   logits    f32 [rows, *], rows stride apart       adjusted  u32 [rows, *], the same
//   history   u32 [slots, slot_len]                   bias      (u32 id, f32) pairs, no id twice in one request
//
//   count     adds up, for each id of a request's history, in what it occurs. Integer atomics: no order matters
//   penalize  repetition: a logit above 0 is divided, another multiplied, where prompt or answer has the id.
//             frequency: for each time that the answer has it; presence: once
//   bias      is added; -infinity forbids an id
//   clear     takes all of it back
//
// A column of workgroups takes a row; an invocation takes every so many positions, or pairs.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "draws.glsl"

layout(local_size_x = 256) in;

struct Pair {
    uint id;
    float bias;
};
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Pairs { Pair at[]; };

layout(push_constant, std430) uniform Push {
    ReadFloats logits;
    Words adjusted;
    Requests requests;
    ReadUints history;
    Pairs bias;
    uint stride;
    uint slot_len;
};

void main() {
    const uint row = gl_WorkGroupID.y, first = gl_GlobalInvocationID.x;
    const uint step_size = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    const uint base = row * stride;
    const Request request = requests.at[row];

#ifndef BIAS
    for (uint i = first; i < request.history_len; i += step_size) {
        const uint at = base + history.at[request.history_slot * slot_len + i];
#if defined(COUNT)
        if (i < request.prompt_len) atomicOr(adjusted.at[at], PROMPT);
        else atomicAdd(adjusted.at[at], 1);
#elif defined(PENALIZE)
        const uint word = atomicOr(adjusted.at[at], 0);
        // Whoever meets an id first changes it; those who meet it at once come to the same number.
        if (word < FIRST_CHANGED) {
            const uint count = word & (PROMPT - 1);
            float logit = logits.at[at];
            logit = logit > 0.0 ? logit / request.repetition : logit * request.repetition;
            logit -= request.frequency * float(count);
            if (count > 0) logit -= request.presence;
            atomicExchange(adjusted.at[at], changed(logit));
        }
#else
        adjusted.at[at] = 0;
#endif
    }
#endif
#if defined(BIAS) || defined(CLEAR)
    for (uint i = first; i < request.biases; i += step_size) {
        const Pair pair = bias.at[request.first_bias + i];
        const uint at = base + pair.id;
#ifdef BIAS
        const bool forbidden = floatBitsToUint(pair.bias) == 0xff800000u;
        const float logit = adjusted_logit(adjusted.at[at], logits.at[at]);
        adjusted.at[at] = changed(forbidden ? FORBIDDEN : logit + pair.bias);
#else
        adjusted.at[at] = 0;
#endif
    }
#endif
}
