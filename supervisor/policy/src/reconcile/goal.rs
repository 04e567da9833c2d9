//! The desired state of a model with its generation, and what became of it.

/// The desired state of a model. Each change gets the next generation number, and whoever changed it
/// waits until [`Goal::settled`] has reached this number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Goal<S> {
    generation: u64,
    desired: S,
    settled: Settled,
}

/// The last generation whose outcome is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// The number of the generation. Earlier generations have the same outcome.
    pub generation: u64,
    /// Success, or the reason why the desired state was given up.
    pub outcome: Result<(), String>,
}

impl<S> Goal<S> {
    /// Creates a goal whose first generation has not been reached.
    pub fn new(desired: S) -> Self {
        let settled = Settled { generation: 0, outcome: Ok(()) };
        Self { generation: 1, desired, settled }
    }

    /// Returns the number of the desired state.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the desired state.
    pub fn desired(&self) -> &S {
        &self.desired
    }

    /// Returns the last outcome.
    pub fn settled(&self) -> &Settled {
        &self.settled
    }

    /// Returns true if the outcome of the desired state is known.
    pub fn is_settled(&self) -> bool {
        self.settled.generation == self.generation
    }

    /// Changes the desired state, and returns its generation. `change` learns whether the outcome of
    /// the earlier desired state is known.
    pub fn change(&mut self, change: impl FnOnce(&mut S, bool)) -> u64 {
        let is_settled = self.is_settled();
        change(&mut self.desired, is_settled);
        self.generation += 1;
        self.generation
    }

    /// Changes a detail of the desired state that no command waits for.
    pub fn amend(&mut self, change: impl FnOnce(&mut S)) {
        change(&mut self.desired);
    }

    /// Records that the state of this generation was reached.
    pub fn confirm(&mut self, generation: u64) {
        self.settled = Settled { generation, outcome: Ok(()) };
    }

    /// Records that the state of this generation cannot be reached. If no later generation exists,
    /// `fallback` becomes the desired state.
    pub fn refuse(&mut self, generation: u64, why: String, fallback: S) {
        if generation == self.generation {
            self.desired = fallback;
        }
        self.settled = Settled { generation, outcome: Err(why) };
    }
}
