//! Translates llama.cpp's grammars (GBNF) into llguidance's dialect of Lark.
//!
//! [`to_lark`] only translates text; it does not compile the grammar. Both grammars accept the same texts: no white
//! space is skipped between terminals, and `root` is the whole answer.
//!
//! llguidance reads an answer in two layers: a lexer takes the longest terminal that matches, and a parser takes
//! terminals. GBNF has one layer, of characters. So `terminals` decides which parts of a grammar can become terminals
//! without a change of meaning. Every other part becomes a rule over single characters.
//!
//! Errors: token literals (`<think>`, `<[7]>`), left recursion, and grammars that exceed a bound.

mod chars;
mod syntax;
mod terminals;

use std::collections::HashSet;
use std::fmt::Write;

use syntax::{Node, Syntax};

/// The Lark grammar that accepts the same texts as a GBNF grammar. Errors give line and column, both from 1.
pub fn to_lark(grammar: &str) -> Result<String, String> {
    let syntax = syntax::read(grammar)?;
    let terminals = terminals::choose(&syntax);
    let mut writer = Writer { syntax: &syntax, terminals, named: HashSet::new(), pending: Vec::new() };
    let mut lark = format!("start: {}\n", writer.atom(syntax.rules[syntax.root].body, false));
    while let Some((node, inside)) = writer.pending.pop() {
        let definition = writer.definition(node, inside);
        writeln!(lark, "{}: {definition}", name(node, inside)).expect("writing to a String cannot fail");
    }
    Ok(lark)
}

/// The name of a node's definition in Lark. Names of rules are lower case, names of terminals are upper case.
fn name(node: usize, terminal: bool) -> String {
    if terminal { format!("T{node}") } else { format!("r{node}") }
}

/// Writes each node as a separate definition, because llguidance limits the nesting of groups.
struct Writer<'a> {
    syntax: &'a Syntax,
    terminals: Vec<bool>,
    /// Nodes that have a definition or are in `pending`. The flag says whether the definition is a terminal.
    named: HashSet<(usize, bool)>,
    pending: Vec<(usize, bool)>,
}

impl Writer<'_> {
    /// The text of a node in the definition of another node. `inside`: the other node is a terminal, so all its parts
    /// are terminals too.
    fn atom(&mut self, node: usize, inside: bool) -> String {
        let node = self.syntax.target(node);
        let terminal = inside || self.terminals[node];
        match &self.syntax.nodes[node] {
            Node::Chars(set) => return format!("/{}/", set.regex()),
            Node::Seq(parts) if parts.is_empty() => return "\"\"".to_owned(),
            Node::Seq(parts) if terminal => {
                if let Some(literal) = self.literal(parts) {
                    return format!("/{literal}/");
                }
            }
            _ => {}
        }
        if self.named.insert((node, terminal)) {
            self.pending.push((node, terminal));
        }
        name(node, terminal)
    }

    /// The regex of a sequence of characters, or `None` if a part is not a character.
    fn literal(&self, parts: &[usize]) -> Option<String> {
        let regex = |part: &usize| match &self.syntax.nodes[*part] {
            Node::Chars(set) => Some(set.regex()),
            _ => None,
        };
        parts.iter().map(regex).collect()
    }

    fn definition(&mut self, node: usize, inside: bool) -> String {
        let syntax = self.syntax;
        match &syntax.nodes[node] {
            Node::Seq(parts) => self.atoms(parts, inside).join(" "),
            Node::Alt(choices) => self.atoms(choices, inside).join(" | "),
            Node::Repeat { node, min: 1, max: None } => format!("{}+", self.atom(*node, inside)),
            // Parentheses, because Lark reads a rule's name before a brace as a template.
            Node::Repeat { node, min, max: None } => format!("({}){{{min},}}", self.atom(*node, inside)),
            Node::Repeat { node, min, max: Some(max) } => {
                format!("({}){{{min},{max}}}", self.atom(*node, inside))
            }
            Node::Chars(_) | Node::Rule(_) => self.atom(node, inside),
        }
    }

    fn atoms(&mut self, nodes: &[usize], inside: bool) -> Vec<String> {
        nodes.iter().map(|node| self.atom(*node, inside)).collect()
    }
}
