//! The text of a GBNF grammar as rules, or an error with line and column.
//!
//! Every rule that is named is defined, once. No rule is left-recursive. Groups and repetitions nest to a bound, so
//! that whoever walks the nodes of one rule may recurse.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use super::chars::CharSet;

/// Most groups around each other.
const MAX_GROUPS: usize = 64;
/// Most nodes around each other. A group takes up to three: alternatives, a sequence, and a repetition.
const MAX_DEPTH: usize = 3 * MAX_GROUPS;
/// What a rule beyond these two bounds is told.
const TOO_DEEP: &str = "expected groups and repetitions that nest less deeply";
/// Largest number in a repetition, as llama.cpp has it.
const MAX_REPETITIONS: u32 = 2000;

/// A part of a rule; the numbers are indices of [`Syntax::nodes`].
#[derive(Debug, PartialEq)]
pub enum Node {
    /// One character of a set, which is not empty.
    Chars(CharSet),
    /// What the rule of this index in [`Syntax::rules`] says.
    Rule(usize),
    /// One node behind another; a sequence of none is the empty text.
    Seq(Vec<usize>),
    Alt(Vec<usize>),
    /// A node so often; `min` is at least 1. An optional part is an [`Node::Alt`] of it and the empty text.
    Repeat {
        node: usize,
        min: u32,
        max: Option<u32>,
    },
}

#[derive(Debug)]
pub struct Rule {
    /// A node that is no [`Node::Rule`].
    pub body: usize,
    /// All nodes of the rule, each behind those it consists of.
    pub nodes: Range<usize>,
}

#[derive(Debug)]
pub struct Syntax {
    pub nodes: Vec<Node>,
    pub rules: Vec<Rule>,
    /// The index of the rule `root`.
    pub root: usize,
}

impl Syntax {
    /// The node that a reference stands for, or the node itself.
    pub fn target(&self, node: usize) -> usize {
        match self.nodes[node] {
            Node::Rule(rule) => self.rules[rule].body,
            _ => node,
        }
    }

    /// For each rule, the rules that it refers to, each once.
    pub fn references(&self) -> Vec<Vec<usize>> {
        let referred = |rule: &Rule| {
            let nodes = self.nodes[rule.nodes.clone()].iter();
            let rules = nodes.filter_map(|node| if let Node::Rule(rule) = node { Some(*rule) } else { None });
            rules.collect::<BTreeSet<usize>>().into_iter().collect()
        };
        self.rules.iter().map(referred).collect()
    }
}

/// Visits a graph depth first. `edges` are the successors of each vertex.
pub struct DepthFirst {
    /// All vertices; each stands behind its successors, except where an edge is in `back`.
    pub order: Vec<usize>,
    /// A vertex on each circle.
    pub on_circles: Vec<usize>,
}

impl DepthFirst {
    pub fn visit(edges: &[Vec<usize>]) -> Self {
        #[derive(Clone, Copy, PartialEq)]
        enum State {
            New,
            Open,
            Done,
        }
        let mut states = vec![State::New; edges.len()];
        let mut visit = Self { order: Vec::with_capacity(edges.len()), on_circles: Vec::new() };
        // The path to the present vertex, with the number of its successors that have been looked at.
        let mut path: Vec<(usize, usize)> = Vec::new();
        for start in 0..edges.len() {
            if states[start] == State::New {
                states[start] = State::Open;
                path.push((start, 0));
            }
            while let Some((vertex, seen)) = path.last_mut() {
                let Some(&next) = edges[*vertex].get(*seen) else {
                    states[*vertex] = State::Done;
                    visit.order.push(*vertex);
                    path.pop();
                    continue;
                };
                *seen += 1;
                match states[next] {
                    State::New => {
                        states[next] = State::Open;
                        path.push((next, 0));
                    }
                    State::Open => visit.on_circles.push(next),
                    State::Done => {}
                }
            }
        }
        visit
    }
}

/// Reads a grammar.
pub fn read(text: &str) -> Result<Syntax, String> {
    let mut reader = Reader {
        text,
        at: 0,
        nodes: Vec::new(),
        depths: Vec::new(),
        rules: Vec::new(),
        indices: HashMap::new(),
    };
    reader.space(true);
    while reader.peek().is_some() {
        reader.rule()?;
    }
    reader.finish()
}

/// A rule that has been named.
struct Named<'a> {
    name: &'a str,
    /// Where the rule is defined, or first referred to.
    at: usize,
    rule: Option<Rule>,
}

struct Reader<'a> {
    text: &'a str,
    /// Bytes read.
    at: usize,
    nodes: Vec<Node>,
    /// For each node, how many others are in it, one within the other.
    depths: Vec<usize>,
    rules: Vec<Named<'a>>,
    indices: HashMap<&'a str, usize>,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn take(&mut self, expected: &str) -> bool {
        let is_next = self.rest().starts_with(expected);
        if is_next {
            self.at += expected.len();
        }
        is_next
    }

    /// An error at a place in the text.
    fn wrong<T>(&self, at: usize, problem: &str) -> Result<T, String> {
        let before = &self.text[..at];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        Err(format!("line {line}, column {column}: {problem}"))
    }

    /// An error at the next character.
    fn expected<T>(&self, expected: &str) -> Result<T, String> {
        let found = self.peek().map_or("the end".to_owned(), |found| format!("{found:?}"));
        self.wrong(self.at, &format!("expected {expected}, found {found}"))
    }

    /// Skips spaces, tabs and comments, and with `lines` the ends of lines.
    fn space(&mut self, lines: bool) {
        while let Some(next) = self.peek() {
            match next {
                ' ' | '\t' => self.at += 1,
                '\r' | '\n' if lines => self.at += 1,
                '#' => self.at += self.rest().find(['\r', '\n']).unwrap_or(self.rest().len()),
                _ => break,
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let other = |c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_';
        let name = &rest[..rest.find(other).unwrap_or(rest.len())];
        self.at += name.len();
        (!name.is_empty()).then_some(name)
    }

    /// The index of the rule whose name stands at `at`.
    fn index(&mut self, name: &'a str, at: usize) -> usize {
        *self.indices.entry(name).or_insert_with(|| {
            self.rules.push(Named { name, at, rule: None });
            self.rules.len() - 1
        })
    }

    fn push(&mut self, node: Node) -> Result<usize, String> {
        let depth = |nodes: &[usize]| nodes.iter().map(|node| self.depths[*node] + 1).max().unwrap_or(0);
        let depth = match &node {
            Node::Chars(_) | Node::Rule(_) => 0,
            Node::Seq(nodes) | Node::Alt(nodes) => depth(nodes),
            Node::Repeat { node, .. } => depth(&[*node]),
        };
        if depth > MAX_DEPTH {
            return self.wrong(self.at, TOO_DEEP);
        }
        self.depths.push(depth);
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    fn rule(&mut self) -> Result<(), String> {
        let at = self.at;
        let Some(name) = self.name() else { return self.expected("the name of a rule") };
        let index = self.index(name, at);
        if self.rules[index].rule.is_some() {
            return self.wrong(at, &format!("the rule {} is defined twice", quoted(name)));
        }
        self.rules[index].at = at;
        self.space(false);
        if !self.take("::=") {
            return self.expected("\"::=\"");
        }
        self.space(true);
        let start = self.nodes.len();
        let mut body = self.alternatives(0)?;
        if matches!(self.nodes[body], Node::Rule(_)) {
            body = self.push(Node::Seq(vec![body]))?;
        }
        self.rules[index].rule = Some(Rule { body, nodes: start..self.nodes.len() });
        if !matches!(self.peek(), None | Some('\r' | '\n')) {
            return self.expected("a part of a rule, or the end of the line");
        }
        self.space(true);
        Ok(())
    }

    /// Reads alternatives in `groups` groups, up to what is part of none.
    fn alternatives(&mut self, groups: usize) -> Result<usize, String> {
        let mut choices = vec![self.sequence(groups)?];
        while self.take("|") {
            self.space(true);
            choices.push(self.sequence(groups)?);
        }
        if choices.len() == 1 { Ok(choices[0]) } else { self.push(Node::Alt(choices)) }
    }

    fn sequence(&mut self, groups: usize) -> Result<usize, String> {
        let mut parts = Vec::new();
        loop {
            let at = self.at;
            match self.peek() {
                Some('"') => parts.push(self.string()?),
                Some('[') => parts.push(self.class()?),
                Some('.') => {
                    self.at += 1;
                    parts.push(self.push(Node::Chars(CharSet::any()))?);
                }
                Some('(') => parts.push(self.group(groups + 1)?),
                Some('*' | '+' | '?' | '{') => {
                    let Some(node) = parts.pop() else {
                        return self.expected("something to repeat before it");
                    };
                    parts.push(self.repetition(node, groups > 0)?);
                }
                Some('<' | '!') => {
                    let problem = "expected text, found a token; token literals are not supported";
                    return self.wrong(at, problem);
                }
                _ => match self.name() {
                    Some(name) => {
                        let index = self.index(name, at);
                        parts.push(self.push(Node::Rule(index))?);
                    }
                    None => break,
                },
            }
            self.space(groups > 0);
        }
        if parts.len() == 1 { Ok(parts[0]) } else { self.push(Node::Seq(parts)) }
    }

    fn group(&mut self, groups: usize) -> Result<usize, String> {
        if groups > MAX_GROUPS {
            return self.wrong(self.at, TOO_DEEP);
        }
        self.at += 1;
        self.space(true);
        let node = self.alternatives(groups)?;
        if !self.take(")") {
            return self.expected("a part of a rule, or \")\"");
        }
        Ok(node)
    }

    fn string(&mut self) -> Result<usize, String> {
        self.at += 1;
        let mut parts = Vec::new();
        while !self.take("\"") {
            let at = self.at;
            let code = self.character("a character, or the closing '\"'")?;
            let set = CharSet::new(vec![(code, code)]);
            if set.is_empty() {
                return self.wrong(at, "expected the number of a character");
            }
            parts.push(self.push(Node::Chars(set))?);
        }
        if parts.len() == 1 { Ok(parts[0]) } else { self.push(Node::Seq(parts)) }
    }

    fn class(&mut self) -> Result<usize, String> {
        let start = self.at;
        self.at += 1;
        let negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            let at = self.at;
            let from = self.character("a character, or the closing ']'")?;
            // A dash before the bracket is a character.
            let mut to = from;
            if self.rest().starts_with('-') && !self.rest().starts_with("-]") {
                self.at += 1;
                to = self.character("the last character of the range")?;
            }
            if to < from {
                return self.wrong(at, "expected a range that ends behind its begin");
            }
            ranges.push((from, to));
        }
        let none = ranges.is_empty();
        let set = CharSet::new(ranges);
        let set = if negated { set.negated() } else { set };
        if none || set.is_empty() {
            return self.wrong(start, "expected a class of at least one character");
        }
        self.push(Node::Chars(set))
    }

    /// The code point of the next character or escape; it may be a number that no character has.
    fn character(&mut self, expected: &str) -> Result<u32, String> {
        let at = self.at;
        let Some(next) = self.peek() else { return self.expected(expected) };
        self.at += next.len_utf8();
        if next != '\\' {
            return Ok(next.into());
        }
        let Some(escape) = self.peek() else { return self.expected("an escape") };
        let digits = match escape {
            'n' => return self.escaped('\n'),
            'r' => return self.escaped('\r'),
            't' => return self.escaped('\t'),
            '\\' | '"' | '[' | ']' | '-' => return self.escaped(escape),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => {
                let known = r#"an escape: one of \n \r \t \\ \" \[ \] \- \x \u \U"#;
                return self.wrong(at, &format!("expected {known}"));
            }
        };
        self.at += 1;
        let code =
            self.rest().get(..digits).filter(|text| text.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let Some(code) = code.and_then(|text| u32::from_str_radix(text, 16).ok()) else {
            return self.expected(&format!("{digits} hexadecimal digits"));
        };
        self.at += digits;
        Ok(code)
    }

    fn escaped(&mut self, character: char) -> Result<u32, String> {
        self.at += 1;
        Ok(character.into())
    }

    /// The repetition that stands here, of a node.
    fn repetition(&mut self, node: usize, lines: bool) -> Result<usize, String> {
        let at = self.at;
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            _ => {
                self.at += 1;
                self.space(lines);
                let min = self.number("a number of repetitions")?;
                self.space(lines);
                let mut max = Some(min);
                if self.take(",") {
                    self.space(lines);
                    let open = self.rest().starts_with('}');
                    max = if open { None } else { Some(self.number("a number of repetitions, or \"}\"")?) };
                    self.space(lines);
                }
                if !self.rest().starts_with('}') {
                    return self.expected("\"}\"");
                }
                (min, max)
            }
        };
        self.at += 1;
        if max.is_some_and(|max| max < min) {
            return self.wrong(at, "expected a repetition whose first number is not the larger one");
        }
        match (min, max) {
            (_, Some(0)) => self.push(Node::Seq(Vec::new())),
            (1, Some(1)) => Ok(node),
            (0, _) => {
                let some = if max == Some(1) { node } else { self.push(Node::Repeat { node, min: 1, max })? };
                let none = self.push(Node::Seq(Vec::new()))?;
                self.push(Node::Alt(vec![some, none]))
            }
            _ => self.push(Node::Repeat { node, min, max }),
        }
    }

    fn number(&mut self, expected: &str) -> Result<u32, String> {
        let rest = self.rest();
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        if digits == 0 {
            return self.expected(expected);
        }
        match rest[..digits].parse() {
            Ok(number) if number <= MAX_REPETITIONS => {
                self.at += digits;
                Ok(number)
            }
            _ => self.wrong(self.at, &format!("expected at most {MAX_REPETITIONS} repetitions")),
        }
    }

    /// Looks for what no single rule shows: rules that are missing, and left recursion.
    fn finish(mut self) -> Result<Syntax, String> {
        let Some(&root) = self.indices.get("root") else {
            return self.expected("a rule with the name \"root\"");
        };
        let mut rules = Vec::with_capacity(self.rules.len());
        for named in &mut self.rules {
            let Some(rule) = named.rule.take() else {
                let (at, name) = (named.at, quoted(named.name));
                return self.wrong(at, &format!("the rule {name} is defined nowhere"));
            };
            rules.push(rule);
        }
        let syntax = Syntax { nodes: std::mem::take(&mut self.nodes), rules, root };
        let left = DepthFirst::visit(&begins(&syntax));
        if let Some(rule) = left.on_circles.first() {
            let (at, name) = (self.rules[*rule].at, quoted(self.rules[*rule].name));
            let problem = "begins with itself; left recursion is not supported, write a repetition";
            return self.wrong(at, &format!("the rule {name} {problem}"));
        }
        Ok(syntax)
    }
}

/// A rule's name in an error, which is one short line.
fn quoted(name: &str) -> String {
    const MOST: usize = 40;
    if name.len() <= MOST { format!("{name:?}") } else { format!("\"{}...\"", &name[..MOST]) }
}

/// For each rule, the rules that its text may begin with.
fn begins(syntax: &Syntax) -> Vec<Vec<usize>> {
    let nullable = nullable(syntax);
    let mut edges = vec![Vec::new(); syntax.rules.len()];
    for (rule, begins) in syntax.rules.iter().zip(&mut edges) {
        let mut pending = vec![rule.body];
        while let Some(node) = pending.pop() {
            match &syntax.nodes[node] {
                Node::Chars(_) => {}
                Node::Rule(rule) => begins.push(*rule),
                Node::Seq(parts) => {
                    let first = parts.iter().position(|part| !nullable[*part]).map_or(parts.len(), |i| i + 1);
                    pending.extend(&parts[..first]);
                }
                Node::Alt(choices) => pending.extend(choices),
                Node::Repeat { node, .. } => pending.push(*node),
            }
        }
    }
    edges
}

/// For each node, whether it accepts the empty text.
fn nullable(syntax: &Syntax) -> Vec<bool> {
    let mut users = vec![Vec::new(); syntax.rules.len()];
    for (user, references) in syntax.references().into_iter().enumerate() {
        for rule in references {
            users[rule].push(user);
        }
    }
    let mut nullable = vec![false; syntax.nodes.len()];
    let mut pending: Vec<usize> = (0..syntax.rules.len()).collect();
    while let Some(index) = pending.pop() {
        let rule = &syntax.rules[index];
        let before = nullable[rule.body];
        for node in rule.nodes.clone() {
            nullable[node] = match &syntax.nodes[node] {
                Node::Chars(_) => false,
                Node::Rule(rule) => nullable[syntax.rules[*rule].body],
                Node::Seq(parts) => parts.iter().all(|part| nullable[*part]),
                Node::Alt(choices) => choices.iter().any(|choice| nullable[*choice]),
                Node::Repeat { node, .. } => nullable[*node],
            };
        }
        if nullable[rule.body] && !before {
            pending.append(&mut users[index]);
        }
    }
    nullable
}
