//! Answers that are on their way to clients.

use shadowslice_datapath::access::AccessEntry;
use shadowslice_datapath::pipeline::Delivery;
use smallvec::SmallVec;

use super::access_entry::log_error;
use super::request_error::RequestError;

/// The answers whose last bytes leave together. A single answer needs no allocation.
#[derive(Debug, Default)]
pub(crate) struct Deliveries {
    answers: SmallVec<[Delivery; 1]>,
    /// The access log's entries of requests that share a call.
    entries: Vec<AccessEntry>,
}

impl Deliveries {
    pub(crate) fn add(&mut self, more: Self) {
        self.entries.extend(more.entries);
        self.answers.extend(more.answers);
    }

    /// Counts the requests as answered, because the socket has their last bytes.
    pub(crate) fn mark_written(&mut self) {
        let Self { answers, entries } = std::mem::take(self);
        entries.iter().for_each(AccessEntry::mark_delivered);
        answers.into_iter().for_each(|mut delivery| delivery.mark_written());
    }

    /// Counts the requests as failed, because their client receives this error instead.
    pub(crate) fn mark_failed(self, why: &RequestError) {
        for entry in &self.entries {
            log_error(entry, why);
            entry.mark_delivered();
        }
        let invalid = why.status().is_client_error();
        let all = self.answers.into_iter();
        all.for_each(|mut delivery| if invalid { delivery.mark_invalid() } else { delivery.mark_failed() });
    }
}

impl From<Delivery> for Deliveries {
    fn from(delivery: Delivery) -> Self {
        Self { answers: SmallVec::from_buf([delivery]), ..Self::default() }
    }
}

impl From<AccessEntry> for Deliveries {
    fn from(entry: AccessEntry) -> Self {
        Self { entries: vec![entry], ..Self::default() }
    }
}
