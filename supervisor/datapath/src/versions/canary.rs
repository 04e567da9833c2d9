//! The requests that a new version answers.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::FractionCounter;
use crate::router::Route;

/// A new version that answers a part of a model's requests.
#[derive(Debug, Clone)]
pub struct Canary {
    pub route: Route,
    pub split: Arc<CanarySplit>,
}

/// The rule that decides which requests the new version answers.
#[derive(Debug)]
pub struct CanarySplit {
    fraction: f64,
    sticky: Option<String>,
    requests: FractionCounter,
}

impl CanarySplit {
    /// Creates a split with this fraction of requests, from 0 to 1. With `sticky`, the value of this
    /// header decides, so that a client always gets the same version. A client that the new version
    /// answers stays with it when the fraction grows.
    pub fn new(fraction: f64, sticky: Option<String>) -> Self {
        Self { fraction, sticky, requests: FractionCounter::default() }
    }

    /// Returns whether the new version answers a request. `header` returns the value of a request's
    /// header. Requests without the header are assigned one by one.
    pub fn selects<'h>(&self, header: impl FnOnce(&str) -> Option<&'h [u8]>) -> bool {
        match self.sticky.as_deref().and_then(header) {
            Some(value) => position(value) < self.fraction,
            None => self.requests.selects(self.fraction),
        }
    }
}

/// Returns a number from 0 to 1 that depends only on the value, and not on the process.
fn position(value: &[u8]) -> f64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish() as f64 / u64::MAX as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_stays_with_its_version_when_the_fraction_grows() {
        let users: Vec<String> = (0..2000).map(|user| format!("user-{user}")).collect();
        let selected = |fraction: f64| -> Vec<&String> {
            let split = CanarySplit::new(fraction, Some("x-user".to_owned()));
            users.iter().filter(|user| split.selects(|_| Some(user.as_bytes()))).collect()
        };
        let (few, many) = (selected(0.1), selected(0.5));
        assert!((150..250).contains(&few.len()) && (900..1100).contains(&many.len()), "{}", few.len());
        assert!(few.iter().all(|user| many.contains(user)));
        assert_eq!(selected(0.1), few);
    }

    #[test]
    fn requests_without_the_header_are_divided_one_by_one() {
        for sticky in [None, Some("x-user".to_owned())] {
            let split = CanarySplit::new(0.25, sticky);
            assert_eq!((0..100).filter(|_| split.selects(|_| None)).count(), 25);
        }
    }
}
