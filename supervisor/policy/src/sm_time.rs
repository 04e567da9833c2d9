//! The division of a GPU's SMs among the batches that execute on it, for the accounting of SM time.
//!
//! Batches on the same SMs take turns. Each batch asks for as many SMs as its share allows. If batches ask
//! for more SMs of a group than there are, each gets its proportion. The sum over all batches is therefore
//! the number of SMs in use, and never exceeds the GPU.

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Sms;

/// The SMs on which a batch may execute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchSms {
    /// The groups of SMs.
    pub groups: Groups,
    /// The number of SMs of the share, which can be smaller than the groups.
    pub share: f64,
}

/// Returns the mean number of SMs that each batch has. `sizes` contains the number of SMs of each group of
/// the GPU. A GPU that does not divide has one group.
pub fn divide(sizes: &[Sms], batches: &[BatchSms]) -> Vec<f64> {
    let in_group = |batch: &BatchSms, group: usize| {
        if !batch.groups.contains(group) {
            return 0.0;
        }
        let allowed = sizes.iter().enumerate().filter(|(group, _)| batch.groups.contains(*group));
        let allowed: f64 = allowed.map(|(_, size)| f64::from(size.0)).sum();
        f64::from(sizes[group].0) * (batch.share / allowed.max(1.0)).min(1.0)
    };
    let mut had = vec![0.0; batches.len()];
    for (group, size) in sizes.iter().enumerate() {
        let asked: Vec<f64> = batches.iter().map(|batch| in_group(batch, group)).collect();
        let excess = (asked.iter().sum::<f64>() / f64::from(size.0.max(1))).max(1.0);
        had.iter_mut().zip(&asked).for_each(|(had, asked)| *had += asked / excess);
    }
    had
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZES: [Sms; 4] = [Sms(8), Sms(8), Sms(8), Sms(12)];

    fn batch(groups: &[usize], share: u32) -> BatchSms {
        BatchSms { groups: groups.iter().copied().collect(), share: f64::from(share) }
    }

    #[test]
    fn a_batch_has_its_groups_up_to_its_share_and_divides_them_with_others() {
        let whole = BatchSms { groups: Groups::WHOLE, share: 36.0 };
        assert_eq!(divide(&SIZES, &[]), Vec::<f64>::new());
        assert_eq!(divide(&SIZES, &[whole]), [36.0]);
        assert_eq!(divide(&SIZES, &[whole, whole, whole]), [12.0; 3]);
        assert_eq!(divide(&SIZES, &[batch(&[0, 3], 20), batch(&[1], 8)]), [20.0, 8.0]);
        assert_eq!(divide(&SIZES, &[whole, batch(&[3], 12)]), [30.0, 6.0]);
        // Percentages of MPS that fit next to each other do not divide anything.
        let part = |share| BatchSms { groups: Groups::WHOLE, share: f64::from(share) };
        assert_eq!(divide(&[Sms(36)], &[part(9), part(18)]), [9.0, 18.0]);
        assert_eq!(divide(&[Sms(36)], &[part(36), part(18)]), [24.0, 12.0]);
    }

    proptest! {
        #[test]
        fn no_more_than_the_gpu_is_given_and_equal_batches_have_the_same(
            batches in proptest::collection::vec((1_u64..16, 1_u32..40), 1..8),
        ) {
            let of = |&(bits, share): &(u64, u32)| BatchSms { groups: Groups::from_bits(bits), share: f64::from(share) };
            let batches: Vec<BatchSms> = batches.iter().map(of).collect();
            let had = divide(&SIZES, &batches);
            prop_assert!(had.iter().sum::<f64>() <= 36.0 + 1e-9);
            for (one, batch) in batches.iter().enumerate() {
                prop_assert!(had[one] > 0.0 && had[one] <= batch.share + 1e-9);
                for other in (0..batches.len()).filter(|&other| batches[other] == *batch) {
                    prop_assert!((had[one] - had[other]).abs() < 1e-9);
                }
            }
        }
    }
}
