//! Answers on their way to clients, and the times at which requests began to arrive.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use shadowslice_datapath::access::AccessEntry;
use shadowslice_datapath::pipeline::Delivery;

use crate::admission::access;
use crate::admission::request_error::RequestError;

/// Answers whose last bytes leave together. A single answer takes no memory of its own here.
#[derive(Debug, Default)]
pub(crate) struct Deliveries {
    first: Option<Delivery>,
    others: Vec<Delivery>,
    /// The records of requests of a call with many.
    records: Vec<AccessEntry>,
}

impl Deliveries {
    pub(crate) fn add(&mut self, more: Self) {
        self.records.extend(more.records);
        for delivery in more.first.into_iter().chain(more.others) {
            match self.first {
                None => self.first = Some(delivery),
                Some(_) => self.others.push(delivery),
            }
        }
    }

    /// Counts the requests as answered: the socket has the last bytes.
    pub(crate) fn written(&mut self) {
        let Self { first, others, records } = std::mem::take(self);
        records.iter().for_each(AccessEntry::mark_delivered);
        first.into_iter().chain(others).for_each(|mut delivery| delivery.mark_written());
    }

    /// Counts the requests as failed: their client gets this error instead.
    pub(crate) fn failed(self, why: &RequestError) {
        for record in &self.records {
            access::failed(record, why);
            record.mark_delivered();
        }
        let invalid = why.status().is_client_error();
        let all = self.first.into_iter().chain(self.others);
        all.for_each(|mut delivery| if invalid { delivery.mark_invalid() } else { delivery.mark_failed() });
    }
}

impl From<Delivery> for Deliveries {
    fn from(delivery: Delivery) -> Self {
        Self { first: Some(delivery), ..Self::default() }
    }
}

impl From<AccessEntry> for Deliveries {
    fn from(record: AccessEntry) -> Self {
        Self { records: vec![record], ..Self::default() }
    }
}

/// The times at which a call read the first bytes of its messages, in their order. While a call has as
/// many requests as it may, it reads nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Beginnings(Arc<Mutex<VecDeque<(Instant, usize)>>>);

impl Beginnings {
    /// Adds messages that begin in the same frame, and so at the same time.
    pub(crate) fn push(&self, at: Instant, messages: usize) {
        if messages > 0 {
            self.0.lock().push_back((at, messages));
        }
    }

    /// Returns when the next whole message began.
    pub(crate) fn next(&self) -> Instant {
        let mut beginnings = self.0.lock();
        let Some((at, left)) = beginnings.front_mut() else { return Instant::now() };
        let at = *at;
        *left -= 1;
        if *left == 0 {
            beginnings.pop_front();
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_message_has_its_own_beginning() {
        let beginnings = Beginnings::default();
        let then = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        let [one, other] = [then, then + Duration::from_secs(1)];
        beginnings.push(one, 2);
        beginnings.push(other, 0);
        beginnings.push(other, 1);
        assert_eq!([beginnings.next(), beginnings.next(), beginnings.next()], [one, one, other]);
        assert!(beginnings.next() > other, "a message that nobody saw begin begins now");
    }
}
