// An implementation of attention.comp with f32 products. Each of the TEAMS teams of 64 lanes processes ROWS rows of the
// item. Lane j of a team computes the scores of key j of a tile for these rows. Then each lane adds up WIDTH
// fours of the values' dimensions: LANES lanes have all dimensions, and add up every PARTS-th key. Every loaded number
// is used for all rows of the lane.
#include "invocation.glsl"

// Number of fours (groups of four dimensions) of a head, and of a lane: two if a head has an even number of fours.
const uint WIDTH = 2 - (FOURS - FOURS / 2 * 2);
// Number of lanes that together have all dimensions of a value, and number of such groups of lanes in a team.
const uint LANES = FOURS / WIDTH;
const uint PARTS = TILE / LANES;
// How many fours of a key, and how many values, are loaded at a time: fewer if each is used for more rows. Queries are
// loaded once for all lanes of a subgroup, and with larger steps they would not fit into the scalar registers.
const uint STEP = FOURS % 4 == 0 ? (ROWS > 4 ? 2 : 4) : WIDTH;
// How many fours of a key a lane loads at a time: whole units (common/kv.glsl), and whole steps.
const uint UNIT = KEY_UNIT(FOURS);
const uint LOADED = UNIT > STEP ? UNIT : STEP;
const uint UNITS = LOADED / UNIT;
const uint AHEAD = TILE % (4 * PARTS) == 0 ? (ROWS > 4 ? 2 : 4) : 1;
const uint MOST_SUBGROUPS = 16;

shared float subgroup_maximum[TEAMS * MOST_SUBGROUPS * ROWS];
shared float weights[TEAMS * TILE * ROWS];
// Two arrays, used alternately for the tiles.
shared uint value_rows[2 * TILE];
#if defined(KV_INT8)
shared float value_scales[2 * TILE];
#endif
shared vec4 part_values[TEAMS * TILE * WIDTH];
shared float part_sum[TEAMS * PARTS];
// Largest score and sum of weights over the previous splits.
shared vec2 joined[TEAMS * ROWS];

// Loads the stored units of a key from `index`: LOADED fours. The units are `stride` fours apart.
void load_key(uint index, uint stride, out uvec4 units[UNITS]) {
    [[unroll]] for (uint u = 0; u < UNITS; u++) {
        const uint at = index + u * stride;
#if defined(KV_F32)
        units[u] = floatBitsToUint(k_cache.at[at]);
#elif defined(KV_F16)
        const uint two = at / 2, first = at % 2 * 2;
        units[u] = UNIT == 2 ? k_cache.at[two] : uvec4(k_cache.at[two][first], k_cache.at[two][first + 1], 0, 0);
#elif defined(KV_INT8)
        units[u] = UNIT == 4 ? ReadUvec4s(uvec2(k_cache)).at[at / 4] : uvec4(k_cache.at[at]);
#endif
    }
}

vec4 key_four(uvec4 unit, uint four) {
#if defined(KV_F32)
    return uintBitsToFloat(unit);
#elif defined(KV_F16)
    return four_of(four % UNIT == 0 ? unit.xy : unit.zw);
#elif defined(KV_INT8)
    return four_of(unit[four % UNIT]);
#endif
}

// Loads this lane's fours of a value, whose row begins at `row`.
void load_value(uint row, uint dim, uint key, out vec4 fours[WIDTH]) {
    if (WIDTH == 2)
        cache_two(v_cache, row + dim * WIDTH, fours[0], fours[WIDTH - 1]);
    else
        fours[0] = cache_four(v_cache, row + dim);
#if defined(KV_INT8)
    [[unroll]] for (uint w = 0; w < WIDTH; w++) fours[w] *= value_scales[key];
#endif
}

void main() {
    const Item item = items.at[gl_WorkGroupID.x];
    const uint kv_head = first_kv_head + gl_WorkGroupID.y;
    const uint team = own_group(TILE), lane = own_invocation() % TILE, subgroups = gl_NumSubgroups / TEAMS;
    const uint part = lane / LANES, dim = lane % LANES;

    // The keys that each row sees, and the address of its query. Rows after the last token repeat that token, and their
    // results are not stored.
    uint first[ROWS], last[ROWS];
    uvec2 query[ROWS];
    uint all_from = 0, all_to = 0xffffffffu;
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        const uint index = team * ROWS + r;
        const uint token = min(index / GROUP, item.tokens - 1);
        first[r] = first_seen(item, token);
        last[r] = last_seen(item, token);
        all_from = max(all_from, first[r]);
        all_to = min(all_to, last[r]);
        const uint row = ((item.token + token) * num_kv_heads + kv_head) * GROUP + index % GROUP;
        query[r] = address_after(uvec2(q), 16 * row * FOURS);
    }
    const uint lowest = first_seen(item, 0), highest = last_seen_by_any(item);
    const uint table = item.sequence * max_blocks, rows = num_kv_heads * block_size, unit_stride = block_size * UNIT;

    for (uint n = 0; n < item.splits; n++) {
        const uint split = item.first_split + n;
        const uint from = max(split_start(split, split_unit, window == 0), lowest);
        const uint to = min(split_start(split + 1, split_unit, window == 0) - 1, highest);
        float maximum[ROWS], sum[ROWS];
        vec4 acc[ROWS][WIDTH];
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            maximum[r] = LOWEST;
            sum[r] = 0.0;
            [[unroll]] for (uint w = 0; w < WIDTH; w++) acc[r][w] = vec4(0);
        }

        for (uint tile = from / TILE * TILE; tile <= to; tile += TILE) {
            const uint key = tile + lane, turn = tile & TILE;
            float score[ROWS];
            [[unroll]] for (uint r = 0; r < ROWS; r++) score[r] = LOWEST;
            if (key >= from && key <= to) {
                const uint block = block_tables.at[table + key / block_size];
                const uint token = key % block_size, start = cache_block(block, rows, FOURS);
                const uint key_start = key_at(start, kv_head, token, 0, block_size, FOURS);
                if (team == 0) value_rows[turn + lane] = value_at(start, kv_head, token, 0, block_size, FOURS);
#if defined(KV_INT8)
                const uint scale_at = cache_scale_at(start, kv_head, token, block_size, rows, FOURS);
                const float scale = uintBitsToFloat(k_cache.at[scale_at]);
                if (team == 0) value_scales[turn + lane] = uintBitsToFloat(v_cache.at[scale_at]);
#endif
                float product[ROWS];
                [[unroll]] for (uint r = 0; r < ROWS; r++) product[r] = 0.0;
                // Not unrolled, because compiling the unrolled loop for a CPU takes minutes.
                // Each part is loaded before the previous one is used.
                uvec4 next[UNITS], units[UNITS];
                load_key(key_start, unit_stride, next);
                [[dont_unroll]] for (uint i = 0; i < FOURS; i += LOADED) {
                    [[unroll]] for (uint u = 0; u < UNITS; u++) units[u] = next[u];
                    const uint ahead = min(i + LOADED, FOURS - LOADED);
                    load_key(key_start + ahead / UNIT * unit_stride, unit_stride, next);
                    [[unroll]] for (uint step = 0; step < LOADED; step += STEP) {
                        [[unroll]] for (uint r = 0; r < ROWS; r++) {
                            ReadVec4s q_part = ReadVec4s(address_after(query[r], 16 * (i + step)));
                            [[unroll]] for (uint s = 0; s < STEP; s++) {
                                const vec4 a = q_part.at[s], b = key_four(units[(step + s) / UNIT], step + s);
                                product[r] = fma(a.x, b.x, product[r]);
                                product[r] = fma(a.y, b.y, product[r]);
                                product[r] = fma(a.z, b.z, product[r]);
                                product[r] = fma(a.w, b.w, product[r]);
                            }
                        }
                    }
                }
                [[unroll]] for (uint r = 0; r < ROWS; r++) {
#if defined(KV_INT8)
                    product[r] *= scale;
#endif
                    if (key >= first[r] && key <= last[r]) score[r] = product[r];
                }
            }
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                const float largest = subgroupMax(score[r]);
                if (subgroupElect())
                    subgroup_maximum[gl_SubgroupID * ROWS + r] = largest;
            }
            barrier();

            float largest[ROWS], correction[ROWS];
            [[unroll]] for (uint r = 0; r < ROWS; r++) largest[r] = maximum[r];
            for (uint i = team * subgroups; i < (team + 1) * subgroups; i++)
                [[unroll]] for (uint r = 0; r < ROWS; r++) largest[r] = max(largest[r], subgroup_maximum[i * ROWS + r]);
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                correction[r] = weight_of(maximum[r], largest[r]);
                weights[(team * TILE + lane) * ROWS + r] = weight_of(score[r], largest[r]);
            }
            [[unroll]] for (uint r = 0; r < ROWS; r++) maximum[r] = largest[r];
            barrier();

            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                sum[r] *= correction[r];
                [[unroll]] for (uint w = 0; w < WIDTH; w++) acc[r][w] *= correction[r];
            }
            if (part >= PARTS) {
                // This lane has no dimensions of the values.
            } else if (TILE % PARTS == 0 && tile >= all_from && tile + TILE - 1 <= all_to) {
                for (uint j = part; j < TILE; j += AHEAD * PARTS) {
                    vec4 value[AHEAD][WIDTH];
                    [[unroll]] for (uint a = 0; a < AHEAD; a++) {
                        const uint of = turn + j + a * PARTS;
                        load_value(value_rows[of], dim, of, value[a]);
                    }
                    [[unroll]] for (uint a = 0; a < AHEAD; a++) {
                        [[unroll]] for (uint r = 0; r < ROWS; r++) {
                            const float weight = weights[(team * TILE + j + a * PARTS) * ROWS + r];
                            sum[r] += weight;
                            [[unroll]] for (uint w = 0; w < WIDTH; w++)
                                acc[r][w] = fma(vec4(weight), value[a][w], acc[r][w]);
                        }
                    }
                }
            } else {
                // The cache may be uninitialized for keys that no row sees. So a key that a row does not see is skipped
                // instead of having a weight of 0.
                for (uint j = part; j < TILE; j += PARTS) {
                    const uint seen = tile + j;
                    if (seen < from || seen > to) continue;
                    vec4 value[WIDTH];
                    load_value(value_rows[turn + j], dim, turn + j, value);
                    [[unroll]] for (uint r = 0; r < ROWS; r++) {
                        if (seen < first[r] || seen > last[r]) continue;
                        const float weight = weights[(team * TILE + j) * ROWS + r];
                        sum[r] += weight;
                        [[unroll]] for (uint w = 0; w < WIDTH; w++)
                            acc[r][w] = fma(vec4(weight), value[w], acc[r][w]);
                    }
                }
            }
        }

        // This loop over the rows is not unrolled, because compilers for CPUs are slow with many barriers.
        [[dont_unroll]] for (uint r = 0; r < ROWS; r++) {
            const uint copies = team * TILE * WIDTH, index = team * ROWS + r;
            vec2 score = vec2(0.0);
            [[unroll]] for (uint s = 0; s < ROWS; s++) {
                if (s != r) continue;
                score.x = maximum[s];
                if (part >= PARTS) continue;
                [[unroll]] for (uint w = 0; w < WIDTH; w++)
                    part_values[copies + part * FOURS + dim * WIDTH + w] = acc[s][w];
                if (dim == 0) part_sum[team * PARTS + part] = sum[s];
            }
            barrier();
            score.y = part_sum[team * PARTS];
            for (uint p = 1; p < PARTS; p++) score.y += part_sum[team * PARTS + p];
            vec2 all = score;
            for (uint four = lane; four < FOURS && index < item.tokens * GROUP; four += TILE) {
                vec4 values = part_values[copies + four];
                for (uint p = 1; p < PARTS; p++) values += part_values[copies + p * FOURS + four];
                const uint at = partial_at(item, kv_head, index) * (FOURS + 1);
                all = store_partial(at, four, n, joined[index], values, score);
            }
            barrier();
            if (lane == 0) joined[index] = all;
        }
    }
}
