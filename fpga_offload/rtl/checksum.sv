// xxh3-64 (seed 0, more than 240 bytes) of pages while their beats pass by: a beat is a stripe of the hash.
//
// A page comes in two halves, K and V, with other pages between them: its state waits in a slot. The sum of a
// hash block, 16 beats, does not depend on the blocks before it. So it is made while the block before is
// scrambled, lane by lane, by one multiplier: a beat a cycle, and none is lost.
`default_nettype none
module checksum #(parameter D = 128, parameter LS = 5, parameter LP = 12, parameter LD = 4) (
    input  wire          clk,
    input  wire          rst,
    input  wire          beat_valid,
    input  wire [511:0]  beat,
    input  wire          beat_first,       // of half a page
    input  wire          is_value,         // of its second half
    input  wire [LS-1:0] slot,             // of the page's state
    input  wire [LP-1:0] place,            // of the page, comes out with its digest
    output wire          hold,             // digests wait: no more pages
    output wire          idle,             // no page is between its last beat and its digest's taking
    output wire          out_valid,
    input  wire          out_ready,
    output wire [LP-1:0] out_place,
    output wire [63:0]   out_digest
);
    localparam HALF = D / 2;               // beats of half a page
    localparam LH = $clog2(HALF);
    localparam [63:0] PRIME64_1 = 64'h9E3779B185EBCA87, AVALANCHE = 64'h165667919E3779F9;
    localparam [31:0] PRIME32_1 = 32'h9E3779B1;
    // Lanes at the beginning, the last one first.
    localparam [511:0] BEGIN = {32'd0, PRIME32_1, 64'h27D4EB2F165667C5, 64'h0000000085EBCA77, 64'h85EBCA77C2B2AE63,
        64'h165667B19E3779F9, 64'hC2B2AE3D27D4EB4F, PRIME64_1, 64'h00000000C2B2AE3D};
    // The default secret, its last word first.
    localparam [1535:0] SECRET = {
        64'h7e404bbbcafbd7af, 64'h280416958f3acb45, 64'hce31d07ad1b8f88f, 64'hfca1477d58be162b,
        64'h9e68d429265516d3, 64'h49daf0b751dd0d17, 64'heb6313faffa081c5, 64'hc3ebd33483acc5ea,
        64'h647378d9c97e9fc8, 64'h3159b4cd4be0518a, 64'h1d4f0bc7c7bbdcf9, 64'h3f349ce33f76faa8,
        64'hd8acdea946ef1938, 64'h4ef90da297486471, 64'ha32e531b8b65d088, 64'hcb00c391bb52283c,
        64'h4c263a81e69035e0, 64'h8e2443f7744608b8, 64'h2172ffcc7dd05a82, 64'h78e5c0cc4ee679cb,
        64'h1f67b3b7a4a44072, 64'hdb979083e96dd4de, 64'h1cad21f72c81017c, 64'hbe4ba423396cfeb8};

    // Stripes: a beat, keyed by the secret from its place in its hash block on; a page's last one by another part.
    reg [LH-1:0] stripes;                  // of the half page so far
    wire [LH-1:0] stripe = beat_first ? {LH{1'b0}} : stripes;
    wire [3:0] block_place = stripe[3:0];
    wire page_last = is_value && stripe == HALF - 1;
    wire [511:0] key = page_last ? SECRET[8*121 +: 512] : SECRET[64*block_place +: 512];
    reg keyed_valid, product_valid, added_valid, keyed_begin, product_begin, added_begin, sum_end;
    reg keyed_end, product_end, added_end;
    reg [511:0] keyed, keyed_word, product, product_word, added, sum;
    reg [LS+LP+1:0] keyed_page, product_page, added_page, sum_page;    // slot, place, first block, last one
    integer i;
    always @(posedge clk) begin
        keyed_valid <= beat_valid && !rst;
        product_valid <= keyed_valid && !rst;
        added_valid <= product_valid && !rst;
        sum_end <= added_valid && added_end && !rst;
        if (beat_valid) stripes <= stripe + 1'b1;
        keyed <= beat ^ key;
        keyed_word <= beat;
        keyed_begin <= block_place == 0;
        keyed_end <= block_place == 15;
        keyed_page <= {slot, place, !is_value && stripe < 16, page_last};
        for (i = 0; i < 8; i = i + 1) begin
            product[64*i +: 64] <= {32'd0, keyed[64*i +: 32]} * {32'd0, keyed[64*i+32 +: 32]};
            added[64*i +: 64] <= product[64*i +: 64] + product_word[64*(i^1) +: 64];
            if (added_valid) sum[64*i +: 64] <= (added_begin ? 64'd0 : sum[64*i +: 64]) + added[64*i +: 64];
        end
        product_word <= keyed_word;
        product_begin <= keyed_begin;
        product_end <= keyed_end;
        product_page <= keyed_page;
        added_begin <= product_begin;
        added_end <= product_end;
        added_page <= product_page;
        if (added_valid) sum_page <= added_page;
    end

    // The sum of a block meets the page's state, a lane a cycle, and is scrambled; behind the last block it is
    // finished.
    reg [63:0] states [0:8*(1<<LS)-1];
    reg [511:0] block;
    reg [LS+LP+1:0] block_page;
    reg [3:0] lanes_left;
    wire [2:0] lane = 3'd0 - lanes_left[2:0];
    wire [LS-1:0] block_slot = block_page[LP+2 +: LS];
    wire [63:0] prior = block_page[1] ? BEGIN[64*lane +: 64] : states[{block_slot, lane}];
    reg folded_valid, mixed_valid, scaled_valid, folded_last;
    reg [2:0] folded_lane, mixed_lane, scaled_lane;
    reg [LS-1:0] folded_slot, mixed_slot, scaled_slot;
    reg [LP-1:0] folded_place;
    reg [63:0] folded, mixed, scaled_low;
    reg [31:0] scaled_high;
    always @(posedge clk) begin
        if (rst) lanes_left <= 0;
        else if (sum_end) lanes_left <= 4'd8;
        else if (lanes_left != 0) lanes_left <= lanes_left - 4'd1;
        if (sum_end) begin
            block <= sum;
            block_page <= sum_page;
        end else block <= {64'd0, block[511:64]};
        folded_valid <= lanes_left != 0 && !rst;
        folded_last <= block_page[0];
        folded_lane <= lane;
        folded_slot <= block_slot;
        folded_place <= block_page[2 +: LP];
        folded <= prior + block[63:0];
        mixed_valid <= folded_valid && !folded_last && !rst;
        mixed_lane <= folded_lane;
        mixed_slot <= folded_slot;
        mixed <= folded ^ (folded >> 47) ^ SECRET[64*(16 + folded_lane) +: 64];
        scaled_valid <= mixed_valid && !rst;
        scaled_lane <= mixed_lane;
        scaled_slot <= mixed_slot;
        scaled_low <= {32'd0, mixed[31:0]} * {32'd0, PRIME32_1};
        scaled_high <= mixed[63:32] * PRIME32_1;
        if (scaled_valid) states[{scaled_slot, scaled_lane}] <= scaled_low + {scaled_high, 32'd0};
    end

    // The end of a page: four products of 64 bits, folded, and one that mixes their sum, all by one multiplier
    // of 32 bits. It takes fewer cycles than half the smallest page has beats.
    reg [63:0] even [0:3];
    reg [63:0] odd [0:3];
    wire page_in = folded_valid && folded_last;
    reg [5:0] step;                        // 0: nothing to do
    reg [LP-1:0] page_place;
    reg [31:0] left, right;
    reg [63:0] partial, total, mixing;
    reg [127:0] wide;
    reg [1:0] left_part, partial_part;
    reg left_end, partial_end, wide_end;
    wire done = step == 27;
    wire [5:0] at = step - 6'd1;
    wire [1:0] pair = at[3:2];
    wire [63:0] a = even[pair] ^ SECRET[8*(11 + 16*pair) +: 64];
    wire [63:0] b = odd[pair] ^ SECRET[8*(19 + 16*pair) +: 64];
    always @(posedge clk) begin
        if (page_in && !folded_lane[0]) even[folded_lane[2:1]] <= folded;
        if (page_in && folded_lane[0]) odd[folded_lane[2:1]] <= folded;
        if (page_in && folded_lane == 7) page_place <= folded_place;
        if (rst) step <= 0;
        else if (page_in && folded_lane == 7) step <= 1;
        else if (step == 27) step <= 0;
        else if (step != 0) step <= step + 6'd1;
        if (at < 16) begin
            left <= at[0] ? a[63:32] : a[31:0];
            right <= at[1] ? b[63:32] : b[31:0];
        end else begin
            left <= at[1:0] == 2 ? mixing[63:32] : mixing[31:0];
            right <= at[1:0] == 3 ? AVALANCHE[63:32] : AVALANCHE[31:0];
        end
        left_part <= at < 16 ? at[1:0] : at[1:0] - 2'd1;
        left_end <= at < 16 && step != 0 && at[1:0] == 3;
        partial <= {32'd0, left} * {32'd0, right};
        partial_part <= left_part;
        partial_end <= left_end;
        case (partial_part)
            0: wide <= {64'd0, partial};
            3: wide <= wide + {partial, 64'd0};
            default: wide <= wide + {32'd0, partial, 32'd0};
        endcase
        wide_end <= partial_end;
        if (page_in && folded_lane == 7) total <= 64'(64 * D) * PRIME64_1;
        else if (wide_end) total <= total + (wide[127:64] ^ wide[63:0]);
        mixing <= total ^ (total >> 37);   // taken from step 22 on
    end

    // Digests wait here.
    reg [LP+63:0] digests [0:(1<<LD)-1];
    reg [LD:0] put, got, pages;            // pages: between their last beat and here
    wire [LD:0] waiting = put - got;
    assign out_valid = waiting != 0;
    assign {out_place, out_digest} = digests[got[LD-1:0]];
    assign hold = waiting >= (1 << LD) - 4;
    assign idle = pages == 0 && waiting == 0;
    wire page_ends = beat_valid && page_last;
    always @(posedge clk) begin
        if (rst) begin
            put <= 0;
            got <= 0;
            pages <= 0;
        end else begin
            if (done) put <= put + 1'b1;
            if (out_valid && out_ready) got <= got + 1'b1;
            pages <= pages + page_ends - done;
        end
        if (done) digests[put[LD-1:0]] <= {page_place, wide[63:0] ^ (wide[63:0] >> 32)};
    end
endmodule
`default_nettype wire
