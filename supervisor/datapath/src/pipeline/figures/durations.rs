//! The times that requests spend in each stage, as sums since the start.

use std::time::Duration;

/// The sums over all answered requests, counted from the last byte of each request. As in Triton,
/// the whole time of a batch counts for each request in the batch. The stages of a request
/// therefore add up to the request's whole time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Durations {
    /// The number of requests in each sum.
    pub count: u64,
    /// The time from a request's last byte to the worker's answer.
    pub request: Duration,
    /// The part of `request` that the other stages do not cover: the wait for a worker's slot and
    /// the wait in the slot. On a real GPU this includes the copy of the inputs to the GPU. Most of
    /// that copy happens while the previous batch executes.
    pub queue: Duration,
    /// The time to copy the inputs into the request slab.
    pub compute_input: Duration,
    /// The execution time that the worker reports. On a real GPU it includes the copy of the
    /// outputs to the host.
    pub compute_infer: Duration,
    /// The time to copy the outputs out of the worker's slab.
    pub compute_output: Duration,
}

/// The times that a single request spent in each stage.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RequestTimes {
    /// The time from the request's first byte to the answer's last byte. Before the answer is
    /// written, this is the time up to the worker's answer.
    pub(crate) latency: Duration,
    /// The part of the latency in which the request was received.
    pub(crate) receiving: Duration,
    /// The time from the end of `receiving` until the request's batch was sent. If the request was
    /// sent more than once, the last time counts.
    pub(crate) until_sent: Duration,
    pub(crate) copy_in: Duration,
    pub(crate) execution: Duration,
    pub(crate) copy_out: Duration,
    /// The time from the worker's answer until the client's socket has accepted the answer.
    pub(crate) writing: Duration,
}

impl Durations {
    pub(crate) fn add(&mut self, spent: &RequestTimes) {
        let RequestTimes { latency, receiving, copy_in, execution, copy_out, writing, .. } = *spent;
        let in_supervisor = latency.saturating_sub(receiving + writing);
        self.count += 1;
        self.request += in_supervisor;
        self.queue += in_supervisor.saturating_sub(copy_in + execution + copy_out);
        self.compute_input += copy_in;
        self.compute_infer += execution;
        self.compute_output += copy_out;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_request_add_up_to_the_time_since_it_was_received() {
        let ms = Duration::from_millis;
        let spent = |in_supervisor: u64| RequestTimes {
            latency: ms(5 + in_supervisor + 4),
            receiving: ms(5),
            until_sent: ms(3),
            copy_in: ms(1),
            execution: ms(10),
            copy_out: ms(2),
            writing: ms(4),
        };
        let mut sums = Durations::default();
        sums.add(&spent(20));
        sums.add(&spent(13));
        assert_eq!((sums.count, sums.request, sums.queue), (2, ms(33), ms(7)));
        assert_eq!((sums.compute_input, sums.compute_infer, sums.compute_output), (ms(2), ms(20), ms(4)));
        sums.add(&spent(5));
        assert_eq!(sums.queue, ms(7), "a worker that reports more than there was takes nothing away");
    }
}
