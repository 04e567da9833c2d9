-- Copies a gRPC call's model name to the header by which Envoy routes the call. Invalid names
-- are not copied, because they would break the call or the connection to the host.
local EXTRACTED = "envoy.filters.http.grpc_field_extraction"
local HEADER = "x-shadowslice-model"
local LONGEST = 128 -- bytes

function envoy_on_request(handle)
  handle:headers():remove(HEADER)
  local extracted = handle:streamInfo():dynamicMetadata():get(EXTRACTED)
  local name = extracted and extracted["name"] and extracted["name"][1]
  if name and #name <= LONGEST and name:find("^[%w._-]+$") then
    handle:headers():add(HEADER, name)
  end
end
