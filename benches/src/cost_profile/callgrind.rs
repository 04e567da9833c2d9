//! A parser for Callgrind's output. It reads the instructions and the calls of each function.

use std::collections::BTreeMap;

use serde::Serialize;

/// The functions of the C library and of jemalloc that allocate memory.
const ALLOCATORS: [&str; 11] = [
    "malloc",
    "calloc",
    "realloc",
    "posix_memalign",
    "aligned_alloc",
    "_rjem_malloc",
    "_rjem_calloc",
    "_rjem_realloc",
    "_rjem_mallocx",
    "_rjem_rallocx",
    "_rjem_aligned_alloc",
];

/// The functions of the C library and of jemalloc that free memory.
const RELEASERS: [&str; 4] = ["free", "_rjem_free", "_rjem_dallocx", "_rjem_sdallocx"];

/// The prefixes of functions inside an allocator. Calls among these functions do not count as
/// allocations.
const ALLOCATOR_INTERNALS: [&str; 6] = ["_int_", "_rjem_", "malloc", "realloc", "unlink_chunk", "do_rallocx"];

/// The costs of all functions of one process.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct CallgrindProfile {
    /// The total number of instructions.
    pub(crate) instructions: u64,
    functions: BTreeMap<String, FunctionCost>,
    /// The number of allocations by each function that calls an allocator.
    pub(crate) allocations_by_caller: BTreeMap<String, u64>,
    pub(crate) allocations: u64,
    pub(crate) releases: u64,
    pub(crate) copies: u64,
    /// The number of instructions in `memcpy` and `memmove`.
    pub(crate) copy_instructions: u64,
    /// The number of times that a thread found a `parking_lot` lock already locked.
    pub(crate) contended: u64,
}

/// The costs of a function.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct FunctionCost {
    pub(crate) calls: u64,
    pub(crate) itself: u64,
    /// The instructions of this function and of the functions that it calls.
    pub(crate) inclusive: u64,
}

impl CallgrindProfile {
    /// Reads Callgrind's format. A line with `fn=` begins a function, and the lines after it
    /// contain positions and costs. After `cfn=` and `calls=`, one line with a position and a cost
    /// contains the cost of the calls. The first occurrence of a name assigns a number to the name.
    /// Later occurrences contain only the number.
    pub(crate) fn parse(text: &str) -> Self {
        let mut profile = Self::default();
        let mut names: BTreeMap<&str, String> = BTreeMap::new();
        let (mut current, mut called) = (String::new(), String::new());
        let mut calls: Option<u64> = None;
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("fn=") {
                current = resolve(name, &mut names);
            } else if let Some(name) = line.strip_prefix("cfn=") {
                called = resolve(name, &mut names);
            } else if let Some(counts) = line.strip_prefix("calls=") {
                calls = counts.split(' ').next().and_then(|count| count.parse().ok());
            } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
                let cost = line.split(' ').nth(1).and_then(|cost| cost.parse().ok()).unwrap_or(0);
                match calls.take() {
                    Some(calls) => profile.call(&current, &called, calls, cost),
                    None => profile.spend(&current, cost),
                }
            }
        }
        profile
    }

    fn spend(&mut self, name: &str, cost: u64) {
        self.instructions += cost;
        let function = self.functions.entry(name.to_owned()).or_default();
        function.itself += cost;
        if is_copy(name) {
            self.copy_instructions += cost;
        }
    }

    fn call(&mut self, caller: &str, called: &str, calls: u64, cost: u64) {
        let function = self.functions.entry(called.to_owned()).or_default();
        function.calls += calls;
        // If a function calls itself, only the cost of the outermost call counts.
        if caller != called {
            function.inclusive += cost;
        }
        let within = ALLOCATOR_INTERNALS.iter().any(|part| caller.starts_with(part));
        if ALLOCATORS.contains(&called) && !within {
            self.allocations += calls;
            *self.allocations_by_caller.entry(caller.to_owned()).or_default() += calls;
        } else if RELEASERS.contains(&called) && !within {
            self.releases += calls;
        } else if is_copy(called) {
            self.copies += calls;
        } else if called.contains("lock_slow") {
            self.contended += calls;
        }
    }

    /// Returns the `count` functions with the most instructions, in descending order. `key` selects
    /// the number of instructions to compare.
    pub(crate) fn top(&self, count: usize, key: fn(&FunctionCost) -> u64) -> Vec<(&str, FunctionCost)> {
        let mut all: Vec<(&str, FunctionCost)> =
            self.functions.iter().map(|(name, function)| (name.as_str(), *function)).collect();
        all.sort_by_key(|(_, function)| std::cmp::Reverse(key(function)));
        all.truncate(count);
        all
    }

    /// Returns the `count` functions with the most allocations, in descending order.
    pub(crate) fn top_allocating(&self, count: usize) -> Vec<(&str, u64)> {
        let mut all: Vec<(&str, u64)> =
            self.allocations_by_caller.iter().map(|(name, calls)| (name.as_str(), *calls)).collect();
        all.sort_by_key(|(_, calls)| std::cmp::Reverse(*calls));
        all.truncate(count);
        all
    }
}

/// Returns the name that a reference stands for. `(7) name` assigns the number 7 to a name, and
/// `(7)` refers to that name. If the name ends with a recursion depth, removes the depth.
fn resolve<'t>(text: &'t str, names: &mut BTreeMap<&'t str, String>) -> String {
    let (number, name) = text.split_once(' ').map_or((text, None), |(number, name)| (number, Some(name)));
    if let Some(name) = name {
        let depth = name.rsplit_once('\'').filter(|(_, depth)| depth.parse::<u32>().is_ok());
        names.insert(number, depth.map_or(name, |(name, _)| name).to_owned());
    }
    names.get(number).cloned().unwrap_or_default()
}

fn is_copy(name: &str) -> bool {
    ["__memcpy_", "__memmove_", "memcpy", "memmove"].iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "version: 1\npositions: line\nevents: Ir\n\n\
        fl=(1) a.rs\nfn=(1) serve\n10 5\n+1 7\ncfn=(2) malloc\ncalls=3 20\n+1 60\ncfn=(3) serve'2\ncalls=1 1\n* 9\n\n\
        fn=(2)\n20 60\ncfn=(4) __memcpy_avx\ncalls=2 1\n+3 8\n\nfn=(4)\n1 8\n\n\
        fn=(5) realloc\n1 2\ncfn=(2)\ncalls=1 1\n+1 6\n";

    #[test]
    fn costs_calls_and_callers() {
        let profile = CallgrindProfile::parse(TEXT);
        assert_eq!(profile.instructions, 5 + 7 + 60 + 8 + 2);
        assert_eq!((profile.allocations, profile.copies, profile.copy_instructions), (3, 2, 8));
        assert_eq!(profile.top_allocating(9), [("serve", 3)], "the allocator's internal calls do not count");
        let malloc = profile.top(1, |function| function.inclusive)[0];
        assert_eq!((malloc.0, malloc.1.calls, malloc.1.inclusive, malloc.1.itself), ("malloc", 4, 66, 60));
        assert_eq!(profile.functions["serve"].inclusive, 0, "only the outermost call of a recursion counts");
    }
}
