// Groups the pairs of a token and one of its experts by expert, for the products of experts.
//
//   experts    u32 [pairs]: the expert of each pair; pair p belongs to token p / per_token
//   rows       u32 [pairs]: the tokens of the pairs, grouped by expert, and within an expert in the order of the pairs
//   positions  u32 [pairs]: the place of each pair in `rows`
//   items      u32 [][4]: (expert, first place in `rows`, number of places, 0), with at most `columns` places each. Only
//              experts that a token chose have items.
//   groups     u32 [2][3]: the workgroup counts of the products of all items with the first matrix and with the second
//              one, which have parts0 and parts1 workgroups for each item
//   used       u32: becomes larger by the number of experts that a token chose
//
// One workgroup computes everything: lane e counts the pairs of expert e.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "lanes.glsl"

layout(local_size_x = INVOCATIONS) in;

layout(push_constant, std430) uniform Push {
    ReadUints experts;
    WriteUints rows;
    WriteUints positions;
    WriteUvec4s items;
    WriteUints groups;
    Uints used;
    uint pairs;
    uint per_token;
    uint columns;
    uint parts0;
    uint parts1;
};

shared uint staged[WORKGROUP];
shared uint counts[WORKGROUP];

// Copies the experts of the pairs from `first` on to shared memory. Returns their number.
uint stage(uint first) {
    barrier();
    const uint count = min(WORKGROUP, pairs - first);
    for (uint i = gl_LocalInvocationID.x; i < count; i += INVOCATIONS) staged[i] = experts.at[first + i];
    barrier();
    return count;
}

void main() {
    uint own[TURNS];
    [[unroll]] for (uint turn = 0; turn < TURNS; turn++) own[turn] = 0;
    for (uint first = 0; first < pairs; first += WORKGROUP) {
        const uint count = stage(first);
        for (uint i = 0; i < count; i++)
            [[unroll]] for (uint turn = 0; turn < TURNS; turn++) own[turn] += uint(staged[i] == lane_of(turn));
    }
    [[unroll]] for (uint turn = 0; turn < TURNS; turn++) counts[lane_of(turn)] = own[turn];
    barrier();
    // From here on, `own` is the place of the expert's next pair.
    [[unroll]] for (uint turn = 0; turn < TURNS; turn++) {
        const uint expert = lane_of(turn), count = own[turn];
        uint place = 0, item = 0, distinct = uint(count > 0);
        for (uint other = 0; other < expert; other++) {
            place += counts[other];
            item += (counts[other] + columns - 1) / columns;
            distinct += uint(counts[other] > 0);
        }
        for (uint i = 0; i < count; i += columns) {
            items.at[item] = uvec4(expert, place + i, min(columns, count - i), 0);
            item++;
        }
        if (expert == WORKGROUP - 1) {
            groups.at[0] = item;
            groups.at[1] = parts0;
            groups.at[2] = 1;
            groups.at[3] = item;
            groups.at[4] = parts1;
            groups.at[5] = 1;
            used.at[0] += distinct;
        }
        own[turn] = place;
    }
    for (uint first = 0; first < pairs; first += WORKGROUP) {
        const uint count = stage(first);
        for (uint i = 0; i < count; i++) {
            [[unroll]] for (uint turn = 0; turn < TURNS; turn++) {
                if (staged[i] != lane_of(turn)) continue;
                rows.at[own[turn]] = (first + i) / per_token;
                positions.at[first + i] = own[turn];
                own[turn]++;
            }
        }
    }
}
