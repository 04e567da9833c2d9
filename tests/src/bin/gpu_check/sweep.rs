use crate::error::Error;
use crate::figures::Figures;
use crate::tools::Setting;

pub(crate) async fn run(_: &Setting, _: &mut Figures) -> Result<(), Error> {
    Err(Error::Unusable("not there yet".into()))
}
