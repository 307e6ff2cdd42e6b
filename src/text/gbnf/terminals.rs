//! Decides which parts of a grammar become terminals. The lexer always takes the longest terminal that matches.
//!
//! A terminal that is a regex over many characters is fast: to compute the mask for free text in a string, the lexer
//! walks a table. A rule over single characters runs the parser for each character of each token of the vocabulary,
//! which is too slow where most tokens are allowed. But the longest match may be the wrong one: with
//! `"a" "bc" | "ab" "d"`, the text "abc" begins with the terminals "a" and "ab", and only "a" leads to a match.
//!
//! So [`choose`] begins with the largest parts without recursion, and splits each terminal for which it cannot prove
//! that the longest match is right. The checks may split a terminal without need, but never keep a wrong one. Terminals
//! of a single character need no check, because all of them have the same length.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::rc::Rc;

use super::chars::CharSet;
use super::syntax::{DepthFirst, Node, Syntax};

/// Most ranges of a [`FirstSets::first`] or [`FirstSets::more`]. A larger set is replaced by the set of all characters.
const MAX_RANGES: usize = 256;
/// Most places and pairs of places that are checked. If there are more, every terminal is a single character.
const MAX_STEPS: usize = 2_000_000;

/// Deepest nesting of copied rules.
const MAX_COPIED: usize = 8;
/// If the graph has this many states, rules are no longer copied.
const MAX_STATES: usize = 20_000;

/// For each node, whether it becomes a terminal where it is not part of another terminal. For a reference, see the
/// entry of its [`Syntax::target`].
pub fn choose(syntax: &Syntax) -> Vec<bool> {
    let sets = FirstSets::of_all(syntax);
    let mut terminals: Vec<bool> =
        sets.iter().map(|sets| sets.as_ref().is_some_and(|sets| !sets.nullable)).collect();
    let mut steps = MAX_STEPS;
    loop {
        let places = Places::new(syntax, &sets, &terminals);
        steps = steps.saturating_sub(syntax.nodes.len());
        match places.unsafe_terminals(syntax, &sets, &mut steps) {
            Some(nodes) if nodes.is_empty() => return terminals,
            Some(nodes) => nodes.into_iter().for_each(|node| terminals[node] = false),
            None => return syntax.nodes.iter().map(|node| matches!(node, Node::Chars(_))).collect(),
        }
    }
}

/// Properties of the texts that a node without recursion matches.
#[derive(Clone)]
struct FirstSets {
    nullable: bool,
    /// The characters that a text may begin with.
    first: CharSet,
    /// The characters that may follow a text of the node within a longer text of the node; all characters if unknown.
    more: CharSet,
}

impl FirstSets {
    /// The sets of each node; `None` for a node that refers, directly or indirectly, to a recursive rule.
    fn of_all(syntax: &Syntax) -> Vec<Option<Self>> {
        let mut all: Vec<Option<Self>> = vec![None; syntax.nodes.len()];
        // In this order, a rule comes after the rules that it refers to, unless they are recursive.
        for rule in DepthFirst::visit(&syntax.references()).order {
            for node in syntax.rules[rule].nodes.clone() {
                all[node] = Self::of(&syntax.nodes[node], |part| all[syntax.target(part)].as_ref());
            }
        }
        all
    }

    fn of<'a>(node: &Node, part: impl Fn(usize) -> Option<&'a Self>) -> Option<Self> {
        let sets = match node {
            Node::Chars(set) => Self { nullable: false, first: set.clone(), more: CharSet::default() },
            Node::Rule(_) => return None,
            Node::Seq(parts) => {
                let mut whole = Self::empty();
                for next in parts {
                    whole = whole.then(part(*next)?).bounded();
                }
                whole
            }
            Node::Alt(choices) => {
                Self::either(&choices.iter().map(|choice| part(*choice)).collect::<Option<Vec<_>>>()?)
            }
            Node::Repeat { node, min, max } => part(*node)?.repeated(*max == Some(*min)),
        };
        Some(sets.bounded())
    }

    fn empty() -> Self {
        Self { nullable: true, first: CharSet::default(), more: CharSet::default() }
    }

    fn then(&self, next: &Self) -> Self {
        // Ambiguous: the same character may continue this part or begin the next one.
        let ambiguous =
            self.more.intersects(&next.first) || self.nullable && self.first.intersects(&next.first);
        let first =
            if self.nullable { CharSet::union([&self.first, &next.first]) } else { self.first.clone() };
        let more = if next.nullable {
            CharSet::union([&self.more, &next.first, &next.more])
        } else {
            next.more.clone()
        };
        Self {
            nullable: self.nullable && next.nullable,
            first,
            more: if ambiguous { CharSet::any() } else { more },
        }
    }

    fn either(choices: &[&Self]) -> Self {
        let first = CharSet::union(choices.iter().map(|choice| &choice.first));
        // The choices are disjoint if no two of them can begin with the same character.
        let disjoint = choices.iter().map(|choice| choice.first.len()).sum::<usize>() == first.len();
        let more = CharSet::union(choices.iter().map(|choice| &choice.more));
        Self {
            nullable: choices.iter().any(|choice| choice.nullable),
            first,
            more: if disjoint { more } else { CharSet::any() },
        }
    }

    fn repeated(&self, exactly: bool) -> Self {
        let more = if self.more.intersects(&self.first) {
            CharSet::any()
        } else if exactly && !self.nullable {
            self.more.clone()
        } else {
            CharSet::union([&self.more, &self.first])
        };
        Self { more, ..self.clone() }
    }

    fn bounded(self) -> Self {
        let bounded = |set: CharSet| if set.ranges() > MAX_RANGES { CharSet::any() } else { set };
        Self { nullable: self.nullable, first: bounded(self.first), more: bounded(self.more) }
    }
}

/// The grammar as a graph of states between terminals. A recursive rule has one begin and one end for all references,
/// so the graph allows all sequences of terminals that the grammar allows, and possibly more.
struct Places {
    /// For each state, the states that can be reached without a terminal.
    skips: Vec<Vec<usize>>,
    /// For each state, the places that begin in it.
    begins: Vec<Vec<usize>>,
    places: Vec<Place>,
}

/// One occurrence of a terminal in the graph.
struct Place {
    /// The node of the terminal.
    node: usize,
    /// The state after it.
    to: usize,
}

impl Places {
    /// The state in which every answer begins.
    const START: usize = 0;

    fn new(syntax: &Syntax, sets: &[Option<FirstSets>], terminals: &[bool]) -> Self {
        let mut places = Self { skips: Vec::new(), begins: Vec::new(), places: Vec::new() };
        let start = places.state();
        let mut build =
            Build { syntax, sets, terminals, places, rules: HashMap::new(), pending: Vec::new(), copied: 0 };
        let (begin, _) = build.ends(syntax.root);
        build.places.skips[start].push(begin);
        while let Some(rule) = build.pending.pop() {
            let (begin, end) = build.ends(rule);
            let last = build.span(syntax.rules[rule].body, begin);
            build.places.skips[last].push(end);
        }
        build.places
    }

    fn state(&mut self) -> usize {
        self.skips.push(Vec::new());
        self.begins.push(Vec::new());
        self.skips.len() - 1
    }

    /// The places that may come next in a state; `None` if the steps are used up.
    fn next(&self, state: usize, steps: &mut usize) -> Option<Vec<usize>> {
        let (mut seen, mut pending, mut next) = (HashSet::from([state]), vec![state], Vec::new());
        while let Some(state) = pending.pop() {
            next.extend(&self.begins[state]);
            *steps = steps.checked_sub(1 + self.skips[state].len())?;
            pending.extend(self.skips[state].iter().filter(|skip| seen.insert(**skip)));
        }
        Some(next)
    }

    /// Terminals for which the longest match may be wrong; `None` if the steps are used up.
    ///
    /// Two places are a pair if the lexer may try both at the same position. Any two of the first places are a pair. If
    /// both places of a pair may match the same text, each place after the first and each place after the second are a
    /// pair as well.
    fn unsafe_terminals(
        &self,
        syntax: &Syntax,
        first_sets: &[Option<FirstSets>],
        steps: &mut usize,
    ) -> Option<BTreeSet<usize>> {
        let of_place =
            |place: usize| first_sets[self.places[place].node].as_ref().expect("a terminal is not recursive");
        let single = |place: usize| matches!(syntax.nodes[self.places[place].node], Node::Chars(_));
        let mut known: HashMap<usize, Rc<[usize]>> = HashMap::new();
        let mut following = |state: usize, steps: &mut usize| -> Option<Rc<[usize]>> {
            if let Some(next) = known.get(&state) {
                return Some(Rc::clone(next));
            }
            let next: Rc<[usize]> = self.next(state, steps)?.into();
            known.insert(state, Rc::clone(&next));
            Some(next)
        };
        let mut found = BTreeSet::new();
        let (mut seen, mut pending) = (HashSet::new(), Vec::new());
        let first = following(Self::START, steps)?;
        let mut sets = vec![(Rc::clone(&first), first)];
        loop {
            for (some, others) in sets.drain(..) {
                *steps = steps.checked_sub(some.len() * others.len())?;
                for pair in some.iter().flat_map(|a| others.iter().map(|b| (*a.min(b), *a.max(b)))) {
                    if seen.insert(pair) {
                        pending.push(pair);
                    }
                }
            }
            let Some((a, b)) = pending.pop() else { return Some(found) };
            let nodes = [a, b].map(|place| self.places[place].node);
            if nodes[0] != nodes[1] {
                if !of_place(a).first.intersects(&of_place(b).first) {
                    continue;
                }
                if !(single(a) && single(b)) {
                    found.extend([a, b].into_iter().filter(|p| !single(*p)).map(|p| self.places[p].node));
                    continue;
                }
            }
            let next = [following(self.places[a].to, steps)?, following(self.places[b].to, steps)?];
            // Here both places have the same terminal, or both are single characters, whose `more` is empty.
            let more = &of_place(a).more;
            *steps = steps.checked_sub(next[0].len() + next[1].len())?;
            if next.iter().any(|next| next.iter().any(|place| of_place(*place).first.intersects(more))) {
                found.insert(nodes[0]);
                continue;
            }
            let [a, b] = next;
            sets.push((a, b));
        }
    }
}

/// Builds the graph of a grammar.
struct Build<'a> {
    syntax: &'a Syntax,
    sets: &'a [Option<FirstSets>],
    terminals: &'a [bool],
    places: Places,
    /// Begin and end of each rule that is referred to.
    rules: HashMap<usize, (usize, usize)>,
    /// Rules whose begin and end exist, but whose body is not in the graph yet.
    pending: Vec<usize>,
    /// Current nesting of copied rules.
    copied: usize,
}

impl Build<'_> {
    fn ends(&mut self, rule: usize) -> (usize, usize) {
        if let Some(ends) = self.rules.get(&rule) {
            return *ends;
        }
        let ends = (self.places.state(), self.places.state());
        self.rules.insert(rule, ends);
        self.pending.push(rule);
        ends
    }

    fn may_copy(&self) -> bool {
        self.copied < MAX_COPIED && self.places.skips.len() < MAX_STATES
    }

    /// Adds a node after the state `from`. Returns the state after the node.
    fn span(&mut self, node: usize, from: usize) -> usize {
        let syntax = self.syntax;
        let target = syntax.target(node);
        if self.terminals[target] {
            let to = self.places.state();
            self.places.begins[from].push(self.places.places.len());
            self.places.places.push(Place { node: target, to });
            return to;
        }
        match &syntax.nodes[node] {
            Node::Chars(_) => unreachable!("a character is a terminal"),
            // Each reference to a rule without recursion gets its own copy of the rule. Example: a rule for white space
            // is used almost everywhere. With only one begin and one end, the graph would allow any order of terminals.
            Node::Rule(_) if self.sets[target].is_some() && self.may_copy() => {
                self.copied += 1;
                let to = self.span(target, from);
                self.copied -= 1;
                to
            }
            Node::Rule(rule) => {
                let (begin, end) = self.ends(*rule);
                self.places.skips[from].push(begin);
                let to = self.places.state();
                self.places.skips[end].push(to);
                to
            }
            Node::Seq(parts) => parts.iter().fold(from, |from, part| self.span(*part, from)),
            Node::Alt(choices) => {
                let to = self.places.state();
                for choice in choices {
                    let last = self.span(*choice, from);
                    self.places.skips[last].push(to);
                }
                to
            }
            // The graph ignores the limits and allows one or more repetitions.
            Node::Repeat { node, .. } => {
                let (begin, to) = (self.places.state(), self.places.state());
                self.places.skips[from].push(begin);
                let last = self.span(*node, begin);
                self.places.skips[last].extend([begin, to]);
                to
            }
        }
    }
}
