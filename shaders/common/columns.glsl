// Four columns of a row of `width` elements. Memory beyond the row may contain any values.

// Replaces columns beyond the row by 0.
vec4 within(vec4 value, uint column, uint width) {
    return mix(vec4(0), value, lessThan(uvec4(column, column + 1, column + 2, column + 3), uvec4(width)));
}

// The elements of the columns from `column` on, of a row that begins at `first`.
vec4 four_at(ReadFloats values, uint first, uint column, uint width) {
    vec4 four = vec4(0);
    [[unroll]] for (uint j = 0; j < 4; j++) {
        if (column + j < width) four[j] = values.at[first + column + j];
    }
    return four;
}

// The sum plus the squares of four elements.
float add_squares(float sum, vec4 v) { return fma(v.w, v.w, fma(v.z, v.z, fma(v.y, v.y, fma(v.x, v.x, sum)))); }
