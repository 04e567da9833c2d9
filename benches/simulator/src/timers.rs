//! A fixed number of timers, with fast access to the earliest timer.

use crate::time::NEVER;

/// A set of timers in a winner tree. With n timers, setting a timer takes O(log n), and reading the
/// earliest time takes O(1).
#[derive(Debug)]
pub(crate) struct Timers {
    /// The nodes. The root has the index 1, and the children of node i have the indices 2i and 2i +
    /// 1. The second half of the nodes are the timers.
    tree: Vec<u64>,
    leaves: usize,
}

impl Timers {
    /// Returns `count` stopped timers.
    pub(crate) fn new(count: usize) -> Self {
        let leaves = count.next_power_of_two().max(2);
        Self { tree: vec![NEVER; 2 * leaves], leaves }
    }

    /// Sets a timer. The time [`NEVER`] stops it.
    pub(crate) fn set(&mut self, timer: usize, at: u64) {
        let mut node = self.leaves + timer;
        self.tree[node] = at;
        while node > 1 {
            node /= 2;
            let earliest = self.tree[2 * node].min(self.tree[2 * node + 1]);
            if self.tree[node] == earliest {
                break;
            }
            self.tree[node] = earliest;
        }
    }

    /// Returns the earliest time of all timers.
    pub(crate) fn due(&self) -> u64 {
        self.tree[1]
    }

    /// Returns the timer with the earliest time. If several timers have this time, returns the
    /// first of these timers.
    pub(crate) fn first(&self) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            if self.tree[node] > self.tree[node + 1] {
                node += 1;
            }
        }
        node - self.leaves
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert_eq, proptest};

    use super::*;

    proptest! {
        #[test]
        fn the_earliest_is_always_known(count in 1..20_usize, sets in proptest::collection::vec((0..20_usize, 0..50_u64), 1..100)) {
            let mut timers = Timers::new(count);
            let mut plain = vec![NEVER; count];
            for (timer, at) in sets {
                let at = if at < 10 { NEVER } else { at };
                timers.set(timer % count, at);
                plain[timer % count] = at;
                let due = *plain.iter().min().unwrap();
                prop_assert_eq!(timers.due(), due);
                if due != NEVER {
                    prop_assert_eq!(Some(timers.first()), plain.iter().position(|&at| at == due));
                }
            }
        }
    }
}
