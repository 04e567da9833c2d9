//! What was found out about a GPU: whether caps that fit pay there, and who leaves SMs to whom.

use shadowslice_shared::units::Sms;

use super::super::Terms;
use super::classes::There;
use super::layout::{self, Useful};
use super::model::Model;
use super::proportion::Proportion;
use super::regime::{Caps, Regime};
use super::sizing;
use super::yielding::Yielding;

/// What is remembered of one GPU.
#[derive(Debug, Clone)]
pub(super) struct Gpu {
    regime: Regime,
    /// Who makes room for higher priorities.
    yielding: Yielding,
    /// Who leaves SMs to others of its priority.
    proportion: Proportion,
}

impl Gpu {
    pub(super) fn new() -> Self {
        Self { regime: Regime::new(), yielding: Yielding::new(), proportion: Proportion::new() }
    }

    /// The same for the same models in other places.
    pub(super) fn findings(&self) -> Self {
        let Self { regime, yielding, proportion } = self;
        Self { regime: regime.clone(), yielding: yielding.findings(), proportion: proportion.findings() }
    }

    /// Learns from an interval, in which nobody's share changed if that is `settled`.
    pub(super) fn observe(&mut self, there: &There<'_>, settled: bool) {
        let span_s = there.span_s();
        if span_s <= 0.0 {
            return;
        }
        self.regime.age(span_s);
        if settled {
            self.regime.observe(there.each(), there.load(there.here), there.slowed());
        }
        self.yielding.observe(&there.with_those_above(), span_s, settled);
        self.yielding.make_room(there.here, there.models);
        self.proportion.observe(&there.alone(), span_s, settled);
        self.proportion.share_out(there.here, there.models, there.terms, there.sms);
    }

    /// The most that each of its models should have, in the order of `here`.
    pub(super) fn levels(&self, here: &[usize], models: &[Model], terms: &[Terms], sms: Sms) -> Vec<Sms> {
        let useful = |model: usize| match &models[model] {
            // Whatever it has is in vain.
            hopeless if hopeless.hopeless(&terms[model]) => Useful { least: None, enough: Some(Sms(0)) },
            model => Useful { least: model.least_share(), enough: sizing::ample(model) },
        };
        let levels = layout::levels(here, terms, sms, self.regime.caps(), useful);
        let level = |(&model, level): (&usize, Sms)| {
            let most = self.yielding.most(model, terms[model].priority, sms);
            let most = self.cap(model).map_or(most, |cap| cap.min(most));
            terms[model].within(level.min(most))
        };
        here.iter().zip(levels).map(level).collect()
    }

    /// The cap of a model that leaves SMs to others of its priority; none where caps fit together anyway.
    fn cap(&self, model: usize) -> Option<Sms> {
        self.proportion.cap(model).filter(|_| self.regime.caps() == Caps::Generous)
    }

    /// Whether something is tried of which nobody knows yet what it is worth.
    pub(super) fn tries(&self) -> bool {
        self.regime.is_tried() || self.yielding.is_tried() || self.proportion.is_tried()
    }

    /// Whether a model is to leave SMs to others.
    pub(super) fn asks(&self, model: usize, priority: u32) -> bool {
        self.yielding.asks(priority) || self.cap(model).is_some()
    }

    /// Whether models of this priority keep what they have, because lower ones make room or soon may.
    pub(super) fn spares(&self, priority: u32) -> bool {
        self.regime.caps() == Caps::Generous && self.yielding.spares(priority)
    }
}
