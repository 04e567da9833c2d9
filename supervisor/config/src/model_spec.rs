//! Describes a configured model for the sharing policy.

use shadowslice_policy::sharing::ModelSpec;
use shadowslice_shared::profile::ProcessMemory;
use shadowslice_shared::units::{Percent, Sms};

use super::types::{HandoverMode, ModelConfig};

impl ModelConfig {
    /// Returns the memory of one more worker according to the profile. Workers of a shared process have no
    /// context of their own.
    pub fn copy_memory(&self) -> Option<ProcessMemory> {
        let memory = self.profile.as_ref()?.memory;
        let context = if self.shared_worker.is_some() { 0 } else { memory.context };
        Some(ProcessMemory { context, ..memory })
    }

    /// Returns the description of this model for the policy. `sms` converts a share to a number of
    /// SMs. If the model's share never changes, the description contains only the initial share.
    pub fn spec(&self, sms: impl Fn(Percent) -> Sms) -> ModelSpec {
        let initial = sms(self.share.initial);
        let mut shares: Vec<Sms> = match self.handover {
            HandoverMode::Never => vec![initial],
            _ => self.shares().map(sms).collect(),
        };
        shares.dedup();
        ModelSpec {
            name: self.name.clone(),
            gpu: self.gpu,
            initial,
            initial_given: self.share.given,
            shares,
            // Nearly all answers of a stream come after the first one.
            slo: self.slo.next.unwrap_or(self.slo.latency),
            percentile: self.slo.percentile,
            priority: self.priority,
            max_batch: self.batch.resolve(true).0.max(1),
            profile: self.profile.clone(),
        }
    }

    /// Returns the model's smallest share that gives at least `wanted` SMs. If no share does,
    /// returns the model's largest share. `sms` converts a share to a number of SMs.
    pub fn smallest_share_for(&self, wanted: Sms, sms: impl Fn(Percent) -> Sms) -> Percent {
        self.shares().find(|&share| sms(share) >= wanted).unwrap_or(self.share.max)
    }

    fn shares(&self) -> impl Iterator<Item = Percent> {
        let may = self.share.min.get()..=self.share.max.get();
        may.filter_map(|percent| Percent::new(percent).ok())
    }
}
