//! The assignment of a GPU's groups to the model, next to other models on the same GPU.

use std::collections::BTreeSet;

use shadowslice_shared::groups::Groups;

use crate::random::Random;

#[derive(Debug)]
pub(crate) struct Ledger {
    total: usize,
    count: usize,
    now: Groups,
    cannot: BTreeSet<Groups>,
}

impl Ledger {
    pub(crate) fn new(total: usize, count: usize) -> Self {
        let now = if count < total { Groups::first(count) } else { Groups::WHOLE };
        Self { total, count, now, cannot: BTreeSet::new() }
    }

    /// Returns the groups that the model should have.
    pub(crate) fn now(&self) -> Groups {
        self.now
    }

    /// Answers a request for a number of groups. The answer avoids partitions that the model cannot
    /// use.
    pub(crate) fn ask(&mut self, count: usize, cannot: Option<Groups>, random: &mut Random) -> Groups {
        self.count = count;
        self.cannot.extend(cannot);
        let stays = self.now.count() == count && !self.cannot.contains(&self.now);
        if count >= self.total {
            self.now = Groups::WHOLE;
        } else if !stays {
            self.place(random);
        }
        self.now
    }

    /// Moves the model's groups to make room for other models, if possible.
    pub(crate) fn move_away(&mut self, random: &mut Random) -> Groups {
        if self.count < self.total {
            self.place(random);
        }
        self.now
    }

    fn place(&mut self, random: &mut Random) {
        let runs = (0..=self.total - self.count).map(|start| (start..start + self.count).collect());
        let runs: Vec<Groups> = runs.filter(|run| !self.cannot.contains(run)).collect();
        self.now = if runs.is_empty() { Groups::WHOLE } else { random.pick(&runs) };
    }
}
