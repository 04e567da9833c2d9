//! Doors while shares change.

use super::*;

#[test]
fn batches_suit_the_least_that_a_model_may_have_before_the_next_decision() {
    let largest = |share: u32, coming: Option<u32>| {
        let terms = models(&[1]);
        let mut facts = facts(&[50], &[Sms(share)]);
        facts.models[0].coming = coming.map(Sms);
        facts.models[0].seen.executed.clear();
        Policy::new(Kind::Adaptive, &[GPU], &terms).decide(&facts).doors[0].max_batch
    };
    assert!(largest(14, None) < largest(66, None));
    assert_eq!(largest(66, Some(14)), largest(14, None), "it may come at any moment");
    assert_eq!(largest(14, Some(66)), largest(14, None), "it has not come yet");
}
