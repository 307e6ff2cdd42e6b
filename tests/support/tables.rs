//! Tables that tests have as texts.

/// The rows `input => expected` of a table. A line that begins with spaces continues the row above it, and a line that
/// begins with `//` is a comment.
pub fn rows(table: &str) -> Vec<(String, String)> {
    let table = table.trim().replace("\n    ", " ");
    let lines = table.lines().filter(|line| !line.starts_with("//"));
    let rows = lines.map(|line| line.split_once(" => ").unwrap_or_else(|| panic!("no row: {line}")));
    rows.map(|(input, expected)| (input.to_owned(), expected.to_owned())).collect()
}
