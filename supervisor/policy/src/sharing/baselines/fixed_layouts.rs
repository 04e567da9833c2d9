//! A layout of the family on each GPU that never changes: the yardstick of the choice among them.

use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::units::Sms;

use super::super::difference::Target;
use super::super::layout::{Layout, Pattern, Placement, Tenant, candidates};
use super::super::{Door, Facts, Terms, Why};

/// The layouts of all GPUs, in their order.
#[derive(Debug, Clone)]
pub(in super::super) struct FixedLayouts {
    layouts: Vec<Layout>,
    shapes: Vec<SharedGpu>,
}

impl FixedLayouts {
    /// Returns the layouts of a pattern. A GPU to whose models it does not apply stays as at rest.
    ///
    /// `work` is the part of its GPU that each model's requests take, 0 to 1.
    pub(in super::super) fn new(
        pattern: Pattern,
        shapes: &[SharedGpu],
        terms: &[Terms],
        work: &[f64],
    ) -> Self {
        let of = |gpu: usize| {
            let mut all = family(gpu, terms, work).into_iter();
            all.find(|layout| layout.pattern == pattern).unwrap_or(Layout::AT_REST)
        };
        Self { layouts: (0..shapes.len()).map(of).collect(), shapes: shapes.to_vec() }
    }

    /// Returns the patterns that apply to the models of at least one GPU.
    pub(in super::super) fn patterns(gpus: usize, terms: &[Terms], work: &[f64]) -> Vec<Pattern> {
        let mut found = Vec::new();
        for layout in (0..gpus).flat_map(|gpu| family(gpu, terms, work)) {
            if !found.contains(&layout.pattern) {
                found.push(layout.pattern);
            }
        }
        found
    }

    pub(in super::super) fn shares(&self, terms: &[Terms]) -> Vec<Sms> {
        (0..terms.len()).map(|model| self.placement(model, terms, true).sms).collect()
    }

    pub(in super::super) fn decide(&self, terms: &[Terms], facts: &Facts) -> Vec<Target> {
        let target = |model: usize| {
            let inside = facts.models[model].groups.is_some();
            let Placement { sms, groups } = self.placement(model, terms, inside);
            Target { sms, groups, door: Door::open(terms[model].max_batch), why: Why::Divided }
        };
        (0..terms.len()).map(target).collect()
    }

    fn placement(&self, model: usize, terms: &[Terms], inside: bool) -> Placement {
        let gpu = terms[model].gpu;
        self.layouts[gpu].placement(model, &terms[model], &self.shapes[gpu], inside)
    }
}

/// Returns all layouts that may help a model of the first priority of a GPU.
fn family(gpu: usize, terms: &[Terms], work: &[f64]) -> Vec<Layout> {
    let tenant = |model: usize| Tenant { model, priority: terms[model].priority, work: work[model] };
    let tenants: Vec<Tenant> =
        (0..terms.len()).filter(|&model| terms[model].gpu == gpu).map(tenant).collect();
    let first = tenants.iter().min_by_key(|tenant| tenant.priority);
    candidates(&tenants, &tenants, first.copied())
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::groups::{GpuPart, Groups};
    use shadowslice_shared::units::Timestamp;

    use super::super::super::Live;
    use super::super::super::fixtures::{live, terms};
    use super::*;

    const SMS: Sms = Sms(132);

    /// Three models on the first GPU, one of them of the first priority, and one on the second.
    fn models() -> Vec<Terms> {
        let model = |(gpu, priority)| Terms { gpu, priority, ..terms("model", 10) };
        [(0, 1), (0, 2), (0, 2), (1, 1)].map(model).to_vec()
    }

    fn gpus() -> Vec<SharedGpu> {
        vec![SharedGpu::new(SMS); 2]
    }

    fn decided(pattern: Pattern, groups: Option<Groups>) -> Vec<Target> {
        let models = models();
        let policy = FixedLayouts::new(pattern, &gpus(), &models, &[0.3; 4]);
        let model = |_: &Terms| Live { groups, ..live(SMS) };
        let facts = Facts {
            now: Timestamp::default(),
            gpus: vec![SMS; 2],
            models: models.iter().map(model).collect(),
        };
        policy.decide(&models, &facts)
    }

    #[test]
    fn each_model_keeps_its_part_and_a_gpu_without_need_stays_at_rest() {
        let division = SharedGpu::new(SMS).division.unwrap();
        let half = |piece| Some(division.groups_in(GpuPart::new(piece, 1, 2)));
        let inside: Vec<_> = decided(Pattern::LowerHalves, Some(Groups::WHOLE));
        let groups: Vec<_> = inside.iter().map(|target| target.groups).collect();
        assert_eq!(groups, [None, half(0), half(1), None]);
        let by_shadows = decided(Pattern::LowerHalves, None);
        let sms: Vec<u32> = by_shadows.iter().map(|target| target.sms.0).collect();
        assert_eq!(sms, [132, 66, 66, 132]);
        assert!(by_shadows.iter().all(|target| target.groups.is_none()));
    }

    #[test]
    fn only_layouts_that_apply_to_a_gpu_are_listed_once_each() {
        let found = |work: &[f64]| FixedLayouts::patterns(2, &models(), work);
        let all = found(&[0.3; 4]);
        assert!(all.contains(&Pattern::LowerHalves) && all.contains(&Pattern::Halves));
        assert!(!all.contains(&Pattern::Thirds) && !all.contains(&Pattern::AtRest), "{all:?}");
        assert!(all.iter().all(|pattern| all.iter().filter(|other| *other == pattern).count() == 1));
        assert_eq!(found(&[0.3, 0.0, 0.0, 0.3]), [], "models without work need no layout");
    }
}
