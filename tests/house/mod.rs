//! The code and the documents themselves: layout rules, and documents compared with the program.

mod docs;
mod tidy;
