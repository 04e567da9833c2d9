//! Inferences over HTTP.

use std::sync::Arc;

use hyper::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Response};
use shadowslice_datapath::pipeline::{Metadata, Pieces, Pipeline, RequestArrival, RequestFailure};
use tokio::sync::SemaphorePermit;

use super::client_timeout::client_timeout;
use super::frontend::Frontend;
use super::inference::{InferenceAnswer, LONG_JSON_BYTES, Target, tensor_bytes};
use super::{load_metrics, trace};
use crate::admission::{Clipped, MemoryPermit, RequestError, invalid, peer, run_blocking};
use crate::tensors::{
    InferRequest, JsonAnswer, OutputForm, OutputTensor, parse_body, text_bytes, write_answer,
};
use crate::transport::{Encoding, HttpAnswer, preferred_encoding};

const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

const WORTH_COMPRESSING_BYTES: usize = 256;

pub(super) async fn infer(
    front: &Frontend,
    target: &Target,
    head: &Parts,
    body: Pieces,
    permit: &Arc<MemoryPermit>,
) -> Result<HttpAnswer, RequestError> {
    let peer = peer(&head.extensions);
    let arrival = arrival(front, target.route.pipeline(), head)?;
    let parse = parse(front, &head.headers, body, &target.metadata, permit);
    let checked = target.receive(front, peer, &arrival, permit, parse).await?;
    let answer = target.infer(checked, arrival, permit).await?;
    let InferenceAnswer { id, outputs, _place } = answer;
    permit.replace(tensor_bytes(&outputs) + text_bytes(&outputs))?;
    let written = write(&target.metadata, id, outputs).await?;
    permit.shrink_to(written.bytes.len());
    let mut answer = respond(written, &head.headers, permit).await?;
    load_metrics::add(&mut answer, load_metrics::header(&head.headers, || target.route.pipeline().load()));
    Ok(answer)
}

/// Returns the arrival of a request, with its timeout and its tenant.
pub(super) fn arrival(
    front: &Frontend,
    pipeline: &Pipeline,
    head: &Parts,
) -> Result<RequestArrival, RequestError> {
    let timeout = client_timeout(&head.headers).inspect_err(|_| pipeline.count_malformed())?;
    let tenant = front.membership.tenant(peer(&head.extensions), &head.headers);
    Ok(RequestArrival { timeout, tenant, ..trace::arrival(&head.extensions) })
}

/// Returns the body without compression. The permit for the decompression lasts until the body has
/// been parsed.
pub(super) async fn decompress(
    front: &Frontend,
    headers: &HeaderMap,
    body: Pieces,
    permit: &Arc<MemoryPermit>,
) -> Result<(Pieces, Option<SemaphorePermit<'static>>), RequestError> {
    let Some(encoding) = content_encoding(headers)? else { return Ok((body, None)) };
    let compressed = permit.join(body)?;
    let (body, decompression) = encoding.decompress(compressed, front.request_bytes, permit.clone()).await?;
    permit.replace(body.len())?;
    Ok((body, Some(decompression)))
}

/// Returns the response with a JSON document, which is compressed if the client prefers that.
pub(super) async fn respond_json(
    json: Vec<u8>,
    headers: &HeaderMap,
    permit: &MemoryPermit,
) -> Result<HttpAnswer, RequestError> {
    respond(JsonAnswer { bytes: json.into(), header_length: None }, headers, permit).await
}

async fn parse(
    front: &Frontend,
    headers: &HeaderMap,
    body: Pieces,
    metadata: &Arc<Metadata>,
    permit: &Arc<MemoryPermit>,
) -> Result<InferRequest, RequestError> {
    let (body, decompression) = decompress(front, headers, body, permit).await?;
    let header_length = header_length(headers)?;
    if header_length.unwrap_or(body.len()) < LONG_JSON_BYTES {
        return parse_body(body, header_length, metadata, permit);
    }
    let (metadata, permit) = (metadata.clone(), permit.clone());
    run_blocking("parsing the request", move || {
        let _decompression = decompression;
        parse_body(body, header_length, &metadata, &permit)
    })
    .await
}

async fn write(
    model: &Arc<Metadata>,
    id: String,
    outputs: Vec<OutputTensor>,
) -> Result<JsonAnswer, RequestFailure> {
    let texts = outputs.iter().filter(|output| output.form == OutputForm::Json);
    if texts.map(|output| output.data.len()).sum::<usize>() < LONG_JSON_BYTES {
        return write_answer(model, &id, &outputs);
    }
    let model = Arc::clone(model);
    run_blocking("writing the answer", move || write_answer(&model, &id, &outputs)).await
}

fn content_encoding(headers: &HeaderMap) -> Result<Option<Encoding>, RequestFailure> {
    let mut encodings = headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .filter(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
    let Some(first) = encodings.next() else { return Ok(None) };
    let name = String::from_utf8_lossy(first.as_bytes());
    let encoding = Encoding::parse(name.trim()).filter(|_| encodings.next().is_none());
    encoding.map(Some).ok_or_else(|| {
        let name = Clipped(&name);
        RequestFailure::Invalid(format!(
            "Content-Encoding {name} is not supported; use either gzip or deflate"
        ))
    })
}

fn header_length(headers: &HeaderMap) -> Result<Option<usize>, RequestFailure> {
    let mut values = headers.get_all(HEADER_LENGTH).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return invalid("Inference-Header-Content-Length is given twice".to_owned());
    }
    let text = String::from_utf8_lossy(value.as_bytes());
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits).map(Some).ok_or_else(|| {
        let text = Clipped(&text);
        RequestFailure::Invalid(format!(
            "Inference-Header-Content-Length must be a number of bytes, got '{text}'"
        ))
    })
}

/// Returns the response with a body, which is compressed if the client prefers that.
async fn respond(
    body: JsonAnswer,
    headers: &HeaderMap,
    permit: &MemoryPermit,
) -> Result<HttpAnswer, RequestError> {
    let accepted = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let encoding = preferred_encoding(accepted).filter(|_| body.bytes.len() >= WORTH_COMPRESSING_BYTES);
    let bytes = match encoding {
        Some(encoding) => {
            let compressed = encoding.compress(permit.join(body.bytes)?, permit).await?;
            permit.shrink_to(compressed.len());
            compressed.into()
        }
        None => body.bytes,
    };
    let mut response = Response::new(bytes.into());
    if let Some(encoding) = encoding {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(encoding.name()));
    }
    let kind = match body.header_length {
        Some(length) => {
            response.headers_mut().insert(HEADER_LENGTH, HeaderValue::from(length));
            "application/octet-stream"
        }
        None => "application/json",
    };
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_length_is_one_number() {
        let header = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(HEADER_LENGTH, HeaderValue::from_static(value));
            }
            header_length(&headers).ok()
        };
        assert_eq!(header(&[]), Some(None));
        assert_eq!(header(&["0"]), Some(Some(0)));
        assert_eq!(header(&["17"]), Some(Some(17)));
        for lie in [&["-1"][..], &["+1"], &["1.5"], &[""], &["99999999999999999999"], &["1", "1"]] {
            assert_eq!(header(lie), None, "{lie:?}");
        }
    }
}
